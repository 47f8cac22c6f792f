"""Step functions whose states have different shapes: functions as users write them, and random functions."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsn_nn.surrogate import ATan

Shape = tuple[int, ...]


class Core(nn.Module):
    """A step function with the shapes of one sample's input and states.

    Attributes:
        num_outputs: number of outputs.
    """

    num_outputs = 1
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, neurons: int = 5, branches: int = 4) -> None:
        super().__init__()
        self.neurons, self.branches = neurons, branches
        self.spike = ATan()
        generator = torch.Generator().manual_seed(5)
        self.make_parameter: Callable[..., nn.Parameter] = lambda *shape: nn.Parameter(
            torch.rand(shape, generator=generator) - 0.25
        )
        self.build()

    def build(self) -> None:
        """Makes the parameters."""

    def shapes(self) -> tuple[Shape, list[Shape]]:
        """Returns the shapes of one sample's input and states."""
        return (self.neurons,), [(self.neurons,), (self.neurons, self.branches)]


class Dendritic(Core):
    """Two compartments, and branches coupled by a small matrix. The largest branch opens the apical compartment."""

    def build(self) -> None:
        self.weight = self.make_parameter(self.neurons, self.branches)
        self.between, self.bias = self.make_parameter(self.branches, self.branches), self.make_parameter(self.branches)

    def shapes(self) -> tuple[Shape, list[Shape]]:
        step, (soma, branches) = super().shapes()
        return step, [soma, soma, branches]

    def forward(self, x: Tensor, soma: Tensor, apical: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = F.linear(branches, self.between, self.bias) + x.unsqueeze(-1) * self.weight
        local = torch.tanh(branches + 0.125 * soma[..., None])
        apical = 0.75 * apical + local.amax(-1)
        h = soma + (local.sum(-1) + apical - soma) / 2
        s = self.spike(h - 0.5)
        return s, h * (1 - s), apical, branches


class Statistics(Core):
    """Reductions over branches, such as `softmax`, `std` and `logsumexp`."""

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = branches / 2 + x.unsqueeze(-1) * torch.arange(1.0, self.branches + 1, dtype=x.dtype, device=x.device)
        shared = branches.softmax(-1) - branches.mean(-1, keepdim=True) / 8
        soma = soma / 2 + torch.logsumexp(shared, -1) + branches.std(-1) - branches.amin(-1) / 8
        return torch.tanh(soma), soma, shared * torch.linalg.vector_norm(branches, dim=-1, keepdim=True)


class InTheMiddle(Core):
    """Branches in the dimension before the neurons, with one input for each branch."""

    def build(self) -> None:
        self.weight = self.make_parameter(self.branches, 1)

    def shapes(self) -> tuple[Shape, list[Shape]]:
        return (self.branches, self.neurons), [(self.branches, self.neurons), (self.neurons,)]

    def forward(self, x: Tensor, branches: Tensor, soma: Tensor) -> tuple[Tensor, ...]:
        branches = 0.5 * branches + self.weight * x
        soma = soma / 2 + (branches * torch.sigmoid(branches)).sum(1)
        return branches - soma[:, None] / 8, branches, soma


class Gates(Core):
    """Three gates side by side in one input, and one state, which is smaller than the input."""

    def build(self) -> None:
        self.bias = self.make_parameter(3 * self.neurons)

    def shapes(self) -> tuple[Shape, list[Shape]]:
        return (3 * self.neurons,), [(self.neurons,)]

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        keep, write, read = (x + self.bias).chunk(3, -1)
        v = torch.sigmoid(keep) * v + torch.tanh(write)
        return torch.sigmoid(read) * torch.tanh(v), v


class Line(Core):
    """Branches in a line. Each branch passes its values to the next one."""

    def build(self) -> None:
        self.weight = self.make_parameter(self.neurons)

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        soma = soma / 2 + self.weight * branches[..., -1]
        first = torch.stack([x, torch.tanh(soma)], -1)
        return soma * branches[..., 1], soma, torch.cat([first, branches[..., : self.branches - 2]], -1)


class Pairs(Core):
    """A product of two values of the step, and a product with a separate matrix for each neuron."""

    def build(self) -> None:
        self.between = self.make_parameter(self.neurons, self.branches, self.branches)

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = torch.einsum("bnk,nkj->bnj", torch.tanh(branches), self.between) + x.unsqueeze(-1)
        soma = soma / 2 + torch.einsum("bnk,bnk->bn", branches, torch.sin(branches))
        return torch.tanh(soma), soma, branches


class Apart(Core):
    """Branches that are neither summed nor coupled. Each branch multiplies the soma by a different factor."""

    def shapes(self) -> tuple[Shape, list[Shape]]:
        return (self.neurons, 1), [(self.neurons, 1), (self.neurons, self.branches)]

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        soma = 0.75 * soma + x
        branches = branches / 2 + soma * torch.arange(1.0, self.branches + 1, dtype=x.dtype, device=x.device)
        return torch.tanh(branches), soma, branches


class Populations(Core):
    """Excitatory neurons and a smaller number of inhibitory neurons, connected by matrices."""

    num_outputs = 2

    def build(self) -> None:
        self.num_inhibitory = self.neurons // 2
        self.within = self.make_parameter(self.neurons, self.neurons)
        self.onto, self.back = (
            self.make_parameter(self.num_inhibitory, self.neurons),
            self.make_parameter(self.neurons, self.num_inhibitory),
        )

    def shapes(self) -> tuple[Shape, list[Shape]]:
        return (self.neurons,), [(self.neurons,), (self.neurons,), (self.num_inhibitory,), (self.num_inhibitory,)]

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + F.linear(s, self.within) - F.linear(inhibitory, self.back) - v) / 2
        k = u + (F.linear(s, self.onto) - u) / 2
        s, inhibitory = self.spike(h - 0.5), self.spike(k)
        return s, inhibitory, s, h * (1 - s), inhibitory, k * (1 - inhibitory)


ON_PIECES = (Dendritic, Statistics, InTheMiddle, Gates, Line, Pairs, Apart)
CORES = (*ON_PIECES, Populations)


class Random(Core):
    """A random step with a soma and branches.

    Args:
        seed: seed of the random choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(5, self.random.choice([1, 2, 3, 4]))

    def build(self) -> None:
        self.weight = self.make_parameter(*self.random.choice([(self.neurons, self.branches), (self.branches,), (1,)]))
        self.between = self.make_parameter(self.branches, self.branches)
        self.lines = [(self.random.choice(_LINES), self.random.random()) for _ in range(self.random.randint(2, 6))]

    def forward(self, x: Tensor, soma: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        soma_values, branch_values = [x, soma], [branches + x.unsqueeze(-1) * self.weight]
        for line, position in self.lines:
            a, b = soma_values[int(position * len(soma_values))], branch_values[int(position * len(branch_values))]
            value = torch.tanh(line(self, a, b))
            (branch_values if value.dim() > a.dim() else soma_values).append(value)
        return soma_values[-1] * branch_values[-1].sum(-1), soma_values[-1], branch_values[-1]


# Lines of a random step. Each line is a function of a value of the soma and a value of the branches.
_LINES: list[Callable[[Random, Tensor, Tensor], Tensor]] = [
    lambda core, a, b: a + b.sum(-1),
    lambda core, a, b: a - b.mean(-1),
    lambda core, a, b: a * b.amax(-1),
    lambda core, a, b: b.amin(-1),
    lambda core, a, b: a * b.max(-1).values,
    lambda core, a, b: b * F.one_hot(b.argmin(-1), core.branches),
    lambda core, a, b: b - a.unsqueeze(-1),
    lambda core, a, b: b * core.weight,
    lambda core, a, b: F.linear(b, core.between),
    lambda core, a, b: b @ core.between + a[..., None],
    lambda core, a, b: b.softmax(-1),
    lambda core, a, b: b * b.logsumexp(-1, keepdim=True),
    lambda core, a, b: torch.where(b > 0.1, b, a.unsqueeze(-1)),
    lambda core, a, b: b[..., 0] * a,
    lambda core, a, b: torch.cat([b[..., 1:], a.unsqueeze(-1)], -1) if core.branches > 1 else a.unsqueeze(-1),
    lambda core, a, b: torch.stack([a] * core.branches, -1) * b,
]
