"""Step functions that the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Core = Callable[..., Any]
Spike = Callable[[Tensor], Tensor]


class SigmoidSurrogate(torch.autograd.Function):
    """Computes `x >= 0`, with the derivative of `sigmoid(4 x)` as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(4.0 * x)
        return grads[0] * 4.0 * soft * (1.0 - soft)


def spike(x: Tensor) -> Tensor:
    """Applies the surrogate as a `torch.autograd.Function`."""
    spikes: Tensor = SigmoidSurrogate.apply(x)
    return spikes


def detach_spike(x: Tensor) -> Tensor:
    """Applies the surrogate with the detach trick."""
    hard = (x >= 0).to(x)
    soft = torch.sigmoid(4.0 * x)
    return hard.detach() + (soft - soft.detach())


@torch.library.custom_op("flexsn_graph_tests::spike", mutates_args=())
def op_spike(x: Tensor) -> Tensor:
    """Applies the surrogate as a custom op with registered autograd."""
    return (x >= 0).to(x.dtype)


@op_spike.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _op_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    soft = torch.sigmoid(4.0 * x)
    return grad * 4.0 * soft * (1.0 - soft)


op_spike.register_autograd(_op_backward, setup_context=_save)


def if_core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + x
    s = spike(h - 1.0)
    return s, h - s


def lif_core(*, hard: bool = True, detach: bool = False, surrogate: Spike = spike) -> Core:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) / 2.0
        s = surrogate(h - 1.0)
        reset = s.detach() if detach else s
        return s, (h * (1.0 - reset) if hard else h - reset)

    return core


class PLIF(nn.Module):
    """LIF with a learnable time constant, which the step reads through `read`."""

    def __init__(self, w: Tensor, read: Callable[[Tensor], Tensor] = lambda w: w) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        self._read = read

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * self._read(self.w).sigmoid()
        s = spike(h - 1.0)
        return s, h * (1.0 - s)


def alif_core(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = v + (x - v) / 2.0
    threshold = 0.5 + 1.8 * a
    s = spike(h - threshold)
    return s, h - s * threshold, 0.8 * a + s


def izhikevich_core(x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = v + 0.5 * (0.04 * v * v + 5.0 * v + 140.0 - u + x)
    u = u + 0.02 * (0.2 * v - u)
    s = spike(v - 30.0)
    return s, torch.where(s > 0, torch.full_like(v, -65.0), v), u + 8.0 * s


def two_by_two_core(x: Tensor, gate: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    i = 0.5 * i + x
    h = 0.75 * v + i * torch.tanh(gate)
    s = spike(h - 0.5)
    return s, h, i, h - s


@dataclass(frozen=True, slots=True)
class Case:
    """A core with the counts of its inputs, states and outputs."""

    name: str
    core: Core
    num_inputs: int = 1
    num_states: int = 1
    num_outputs: int = 1
    scale: float = 1.0

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_inputs, self.num_states, self.num_outputs

    def arguments(self, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        count = self.num_inputs + self.num_states
        return [(self.scale * torch.randn(shape, generator=generator)).to(dtype) for _ in range(count)]


CASES = [
    Case("if", if_core),
    Case("lif_hard", lif_core()),
    Case("lif_hard_detached", lif_core(detach=True)),
    Case("lif_soft", lif_core(hard=False)),
    Case("lif_soft_detached", lif_core(hard=False, detach=True)),
    Case("lif_detach_trick", lif_core(surrogate=detach_spike)),
    Case("lif_custom_op", lif_core(surrogate=op_spike)),
    Case("alif", alif_core, 1, 2, 1),
    Case("izhikevich", izhikevich_core, 1, 2, 1, scale=40.0),
    Case("two_by_two", two_by_two_core, 2, 2, 2),
]
