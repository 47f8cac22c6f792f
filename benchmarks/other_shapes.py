"""Steps whose states have other shapes than the input: times of training steps in compiled kernels and in the loop.

    python benchmarks/other_shapes.py [--output FILE] [--seconds 55] [--shapes TxBxN ...] [--only NAME ...]

A dendritic neuron has a soma, an apical compartment and four branches `[B, N, 4]`, and a 4 x 4 matrix couples the
branches. Populations have four excitatory neurons for each inhibitory neuron. A training step is a forward, and a
backward that computes the gradients of the input and the parameters from a random gradient, in float32 and in eager
mode. The loop and the kernels alternate three times, and a figure is the median. Without a GPU, the kernels are in C++.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from against_loop import main
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.surrogate import ATan

BRANCHES = 4


class Dendritic(nn.Module):
    """A neuron whose branches drive its soma. The branch with the largest potential drives an apical compartment, which
    also drives the soma.

    If `matrix` is True, a matrix couples the branches of a neuron.
    """

    def __init__(self, neurons: int, *, matrix: bool = True) -> None:
        super().__init__()
        self.spike = ATan()
        self.weight = nn.Parameter(torch.rand(neurons, BRANCHES))
        self.between = nn.Parameter(0.7 * torch.eye(BRANCHES) + 0.05) if matrix else None

    def forward(self, x: Tensor, soma: Tensor, apical: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        decayed = 0.75 * branches if self.between is None else F.linear(branches, self.between)
        branches = decayed + x.unsqueeze(-1) * self.weight
        local = torch.sigmoid(4 * branches - 2)
        apical = 0.9 * apical + 0.1 * local.amax(-1)
        h = soma + (local.sum(-1) + apical - soma) / 2
        s = self.spike(h - 1)
        return s, h * (1 - s), apical, branches

    def states(self, like: Tensor) -> list[Tensor]:
        zero = torch.zeros_like(like)
        return [zero, zero.clone(), like.new_zeros(*like.shape, BRANCHES)]


class Branches(Dendritic):
    """Dendritic neurons whose branches are not coupled."""

    def __init__(self, neurons: int) -> None:
        super().__init__(neurons, matrix=False)


class Populations(nn.Module):
    """LIF neurons with recurrent weights: `neurons` excitatory neurons and `neurons // 4` inhibitory neurons."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.spike, self.num_inhibitory = ATan(), neurons // 4
        self.ei = nn.Parameter(torch.rand(self.num_inhibitory, neurons) / neurons)
        self.ie = nn.Parameter(torch.rand(neurons, self.num_inhibitory) / self.num_inhibitory)
        self.add_inner_weights(neurons)

    def add_inner_weights(self, neurons: int) -> None:
        self.ee = nn.Parameter(torch.rand(neurons, neurons) / neurons)

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + F.linear(s, self.ee) - F.linear(inhibitory, self.ie) - v) / 2
        k = u + (4 * F.linear(s, self.ei) - u) / 2
        s, inhibitory = self.spike(h - 1), self.spike(k - 1)
        return s, s, h * (1 - s), inhibitory, k * (1 - inhibitory)

    def states(self, like: Tensor) -> list[Tensor]:
        zero, inhibitory = torch.zeros_like(like), like.new_zeros(*like.shape[:-1], self.num_inhibitory)
        return [zero, zero.clone(), inhibitory, inhibitory.clone()]


class Disynaptic(Populations):
    """Populations without weights between excitatory neurons."""

    def add_inner_weights(self, neurons: int) -> None:
        pass

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - F.linear(inhibitory, self.ie) - v) / 2
        k = u + (4 * F.linear(s, self.ei) - u) / 2
        s, inhibitory = self.spike(h - 1), self.spike(k - 1)
        return s, s, h * (1 - s), inhibitory, k * (1 - inhibitory)


CORES = (Dendritic, Branches, Populations, Disynaptic)


class Layer(FlexSN):
    """A layer that holds a core and its states."""

    core: Dendritic | Populations

    def __init__(self, core: Dendritic | Populations, backend: str) -> None:
        super().__init__(core, 1, 3 if isinstance(core, Dendritic) else 4, 1, backend=backend)

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        return self.core.states(inputs[0][0])


if __name__ == "__main__":
    main("other_shapes", "States of other shapes", CORES, Layer)
