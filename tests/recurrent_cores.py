"""Step functions that mix neurons through matrices, as users write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Matrix = Callable[[int, int], Tensor]


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad / (1.0 + x * x)


class _Soft(torch.autograd.Function):
    """A smooth function for finite differences. Its derivative is the surrogate derivative of `_Spike`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.atan()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad / (1.0 + x * x)


class Cell(nn.Module):
    """A core with matrices.

    Args:
        size: H, the size of the step's last dimension.
        matrix: function from a shape to a matrix.
        soft: True to replace spikes by a smooth function.
    """

    num_states = 2
    num_inputs = 1

    def __init__(self, size: int, matrix: Matrix, *, soft: bool = False) -> None:
        super().__init__()
        self.size = size
        self.spike: Callable[[Tensor], Tensor] = _Soft.apply if soft else _Spike.apply
        self.build(size, matrix)

    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(matrix(size, size))

    def extra(self, *shape: int, value: float = 0.25) -> nn.Parameter:
        """Makes a parameter. Its elements have few significant bits, and adjacent elements differ."""
        count = torch.Size(shape).numel()
        return nn.Parameter((torch.arange(count) % 4 * 0.125 + value).reshape(shape))

    def lif(self, current: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + (current - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


class RLIF(Cell):
    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(x + F.linear(s, self.v), s, v)


class Biased(Cell):
    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.b = self.extra(size)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(x + F.linear(s, self.v, self.b), s, v)


class OfMembrane(Cell):
    """A core that multiplies the matrix by a pointwise function of a state, and not by the state itself."""

    num_states = 1

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        spikes = self.spike(v - 1)
        h = v * 0.5 * (1 - spikes) + x + spikes @ self.v
        return self.spike(h - 1), h


class Late(Cell):
    """A core with states that only store an earlier value of another state: a chain of three such states, and a state
    that copies the same state as the first of the chain, but has other initial values.
    """

    num_states = 6

    def forward(self, x: Tensor, s: Tensor, s1: Tensor, s2: Tensor, aside: Tensor, s3: Tensor, v: Tensor) -> Any:
        late = s1 * 0.5 + s3 - aside * 0.25 + s2 * 0.125
        spike, s_new, v = self.lif(x + F.linear(late, self.v), s, v)
        return spike, s_new, s, s1, s, s2, v


class TwoMatrices(Cell):
    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.u = nn.Parameter(matrix(size, size))

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(x + s @ self.v - torch.matmul(v, self.u) * 0.5, s, v)


class LowRank(Cell):
    def build(self, size: int, matrix: Matrix) -> None:
        self.down = nn.Parameter(matrix(size, size)[: (size + 1) // 2].clone())
        self.up = nn.Parameter(matrix(size, size)[:, : (size + 1) // 2].clone())

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(x + F.linear(F.linear(s, self.down), self.up), s, v)


class Masked(Cell):
    mask: Tensor

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.register_buffer("mask", (torch.arange(size * size).reshape(size, size) % 3 > 0).float())

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(x + F.linear(s, self.v * self.mask), s, v)


class Heads(Cell):
    """A core with a block-diagonal matrix."""

    def build(self, size: int, matrix: Matrix) -> None:
        self.count = 3
        self.v = nn.Parameter(torch.stack([matrix(size // 3, size // 3) for _ in range(3)]))

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        heads = s.view(*s.shape[:-1], self.count, -1)
        mixed = torch.einsum("...hd,hde->...he", heads, self.v).reshape(s.shape)
        return self.lif(x + mixed, s, v)


class Adaptive(Cell):
    num_states = 3

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.beta = self.extra(size)

    def forward(self, x: Tensor, s: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        a = 0.75 * a + s
        h = 0.5 * v + x + F.linear(s, self.v)
        s = self.spike(h - 1 - self.beta * a)
        return s, s, h - s, a


class MinimalGRU(Cell):
    num_states = 1

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.u = nn.Parameter(matrix(size, size))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        z = torch.sigmoid(x + F.linear(h, self.v))
        n = torch.tanh(x + F.linear(h, self.u))
        h = (1 - z) * h + z * n
        return h, h


class GRU(Cell):
    """A GRU as cuDNN computes it."""

    num_states = 1

    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(torch.cat([matrix(size, size) for _ in range(3)]))
        self.b = self.extra(3 * size)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        r, z, n = F.linear(h, self.v, self.b).chunk(3, -1)
        n = torch.tanh(x + torch.sigmoid(x + r) * n)
        z = torch.sigmoid(x + z)
        h = (1 - z) * n + z * h
        return h, h


class GatedGRU(Cell):
    """A GRU in its original form, in which a factor of a product depends on another product of the same step."""

    num_states = 1

    def build(self, size: int, matrix: Matrix) -> None:
        self.v, self.u, self.w = (nn.Parameter(matrix(size, size)) for _ in range(3))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        r = torch.sigmoid(x + F.linear(h, self.v))
        z = torch.sigmoid(x + F.linear(h, self.u))
        n = torch.tanh(x + F.linear(r * h, self.w))
        h = (1 - z) * n + z * h
        return h, h


class LSTM(Cell):
    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(torch.cat([matrix(size, size) for _ in range(4)]))
        self.b = self.extra(4 * size)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = F.linear(h, self.v, self.b).split(self.size, -1)
        c = torch.sigmoid(f + x) * c + torch.sigmoid(i) * torch.tanh(g + x)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c


class SLSTM(Cell):
    """An LSTM with exponential gates. A state with the largest exponent so far keeps the gates in range."""

    num_states = 4

    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(torch.cat([matrix(size, size) for _ in range(4)]))

    def forward(self, x: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        i, f, z, o = (gate + x for gate in F.linear(h, self.v).chunk(4, -1))
        log_forget = F.logsigmoid(f) + m
        m = torch.maximum(log_forget, i)
        i, f = torch.exp(i - m), torch.exp(log_forget - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / (n.abs() + 0.5)
        return h, h, c, n, m


class WideInput(Cell):
    """An LSTM whose input holds all gates in one tensor, and is therefore wider than the step."""

    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(torch.cat([matrix(size, size) for _ in range(4)]))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        gates = torch.cat([x, x, x, x], -1) + F.linear(h, self.v)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c


class SigmaDelta(Cell):
    """A core that sends changes above a threshold, and multiplies these changes by a matrix."""

    num_states = 3

    def forward(self, x: Tensor, sent: Tensor, sum_: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        sum_ = sum_ + F.linear(sent, self.v)
        v = 0.5 * v + x + 0.25 * sum_
        change = self.spike(v - 1) - self.spike(-v - 1)
        return change, change, sum_, v - change


class Synaptic(Cell):
    num_states = 3

    def forward(self, x: Tensor, s: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        i = 0.75 * i + x + F.linear(s, self.v)
        h = 0.5 * v + i - s
        s = self.spike(h - 1)
        return s, s, i, h


class OfInputToo(Cell):
    """A core that contains the linear layer of its input. The product of this layer needs no earlier steps."""

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.w = nn.Parameter(matrix(size, size))
        self.b = self.extra(size)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(F.linear(x * 0.5, self.w, self.b) + F.linear(s, self.v), s, v)


class Readout(Cell):
    """A core whose output is a product with the spikes of the step. No later step needs this product."""

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.w = nn.Parameter(matrix(size, size))

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        _, s, v = self.lif(x + F.linear(s, self.v), s, v)
        return F.linear(s, self.w) * 0.5, s, v


class Hidden(Cell):
    """A core with two successive products. The values between the products are narrower than the step."""

    def build(self, size: int, matrix: Matrix) -> None:
        self.down = nn.Parameter(matrix(size, size)[: size - 2].clone())
        self.up = nn.Parameter(matrix(size, size)[:, : size - 2].clone())
        self.b = self.extra(size - 2)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        hidden = F.linear(s, self.down, self.b).clamp(0.0, 1.0) * self.b
        return self.lif(x + F.linear(hidden, self.up), s, v)


class Sliced(Cell):
    """A core that uses two of the three blocks of columns of a wide product."""

    def build(self, size: int, matrix: Matrix) -> None:
        self.v = nn.Parameter(torch.cat([matrix(size, size) for _ in range(3)]))

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, n = F.linear(s, self.v), self.size
        return self.lif(x + q[..., :n] * 0.5 + q[..., n : 2 * n] * x, s, v)


class Linear(Cell):
    """A core whose state is itself a product, without a function applied to it."""

    num_states = 1

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = F.linear(h, self.v)
        return h + x, h


class Transposed(Cell):
    """A core with two products: one with `addmm`, and one with the matrix on the left."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.lif(torch.addmm(x, s, self.v, beta=0.5, alpha=2.0) + (self.v @ s.t()).t(), s, v)


class LearnedDecay(Cell):
    """A core with a matrix and two other parameters: one value for all neurons, and one value for each neuron."""

    def build(self, size: int, matrix: Matrix) -> None:
        super().build(size, matrix)
        self.tau = nn.Parameter(torch.tensor(0.5))
        self.threshold = self.extra(size, value=1.0)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + F.linear(s, self.v) - v) * self.tau
        s = self.spike(h - self.threshold)
        return s, s, h - s * self.threshold


_ROW_FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a - b.mean(-1, keepdim=True),
    lambda a, b: a * b.softmax(-1),
    lambda a, b: a * 0.5 - b.amax(-1, keepdim=True),
    lambda a, b: a / (1 + (b * b).sum(-1)[..., None]),
    lambda a, b: F.layer_norm(a - b, a.shape[-1:]),
]


_KINDS = ["linear", "linear", "biased", "twice", "split", "pointwise", "pointwise", "spike", "rows", "rows"]


class RandomCell(Cell):
    """A core with random pointwise ops, products, and reductions over rows."""

    def __init__(self, size: int, matrix: Matrix, *, soft: bool = False, seed: int = 0) -> None:
        self._seed = seed
        self.num_states = 1 + seed % 3
        super().__init__(size, matrix, soft=soft)

    def build(self, size: int, matrix: Matrix) -> None:
        widths = (size, size + 2, 2 * size)
        self.matrices = nn.ParameterDict(
            {f"{a}_{b}": nn.Parameter(matrix(b, a)) for a in widths for b in widths if size in (a, b)}
        )
        self.biases = nn.ParameterDict({str(n): self.extra(n) for n in widths})

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(self._seed)
        size, values = self.size, [x, *states]
        for _ in range(draw.randint(4, 9)):
            first, second = draw.choice(values), draw.choice(values)
            kind = draw.choice(_KINDS)
            if kind == "linear":
                new = F.linear(first, self.matrices[f"{size}_{size}"])
            elif kind == "biased":
                new = F.linear(first.tanh(), self.matrices[f"{size}_{size}"], self.biases[str(size)])
            elif kind == "twice":
                between = F.linear(first, self.matrices[f"{size}_{size + 2}"])
                scale = draw.choice([1.0, self.biases[str(size + 2)]])
                new = F.linear(between * scale, self.matrices[f"{size + 2}_{size}"])
            elif kind == "split":
                a, b = F.linear(first, self.matrices[f"{size}_{2 * size}"], self.biases[str(2 * size)]).chunk(2, -1)
                new = a.sigmoid() * b + second * 0.25
            elif kind == "rows":
                new = draw.choice(_ROW_FUNCTIONS)(first, second)
            elif kind == "pointwise":
                new = first * 0.5 - second.sin() * self.biases[str(size)]
            else:
                new = self.spike(first - 0.5) * second
            values.append(new)
        return tuple(v.tanh() for v in values[-1 - self.num_states :])


CELLS: tuple[type[Cell], ...] = (
    RLIF,
    Biased,
    OfMembrane,
    Late,
    TwoMatrices,
    LowRank,
    Masked,
    Heads,
    Adaptive,
    MinimalGRU,
    GRU,
    GatedGRU,
    LSTM,
    WideInput,
    SigmaDelta,
    Synaptic,
    OfInputToo,
    Readout,
    Hidden,
    Sliced,
    Linear,
    Transposed,
    LearnedDecay,
)


@dataclass(frozen=True)
class Powers:
    """Matrices with at most one power of two in each row and column, so that every sum in a product has one term."""

    seed: int = 0

    def __call__(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + rows + 31 * columns)
        order = torch.randperm(max(rows, columns), generator=generator)
        scales = 2.0 ** torch.randint(-2, 1, (max(rows, columns),), generator=generator)
        matrix: Tensor = torch.diag(scales)[order][:rows, :columns].clone()
        return matrix


@dataclass(frozen=True)
class Dense:
    """Matrices with random elements.

    Attributes:
        bits: number of significant bits of each element; `None` for all bits.
    """

    bits: int | None = None
    seed: int = 0

    def __call__(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + rows + 31 * columns)
        values = torch.randn(rows, columns, generator=generator)
        if self.bits is None:
            return values / float(columns**0.5)
        scale = float(2 ** (self.bits - 1))
        return (values * scale / 2).round().clamp(-scale, scale) / scale
