"""Common step functions, which are test cases for all ways to run a scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Spike = Callable[[Tensor], Tensor]


class SigmoidSpike(torch.autograd.Function):
    """A function that is 1 where `x >= 0`, and 0 elsewhere. Its gradient is that of `sigmoid(4 x)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(4.0 * x)
        return grad * 4.0 * soft * (1.0 - soft)


def hard_spike(x: Tensor) -> Tensor:
    spike: Tensor = SigmoidSpike.apply(x)
    return spike


def soft_spike(x: Tensor) -> Tensor:
    """Computes a smooth replacement for the spike, so that numerical and analytical gradients can be compared."""
    return torch.sigmoid(4.0 * x)


@dataclass(frozen=True)
class Case:
    """A step function and its captured parameters.

    Attributes:
        make: function that makes the core from the spike function and the parameters.
        parameters: function from the shape `[B, C]` of the step to the shape of each captured parameter.
        exact_on_cpu: False if the core uses exp or tanh. Eager mode on the CPU computes these functions differently in
            full vectors and in the remaining elements of a tensor, so another order of the elements gives other bits.
        smooth: False if the core detaches a value. Then its gradient is not its derivative.
    """

    name: str
    num_inputs: int
    num_states: int
    num_outputs: int
    make: Callable[[Spike, list[Tensor]], Callable[..., Any]]
    parameters: Callable[[tuple[int, ...]], list[tuple[int, ...]]] = lambda step: []
    exact_on_cpu: bool = True
    smooth: bool = True

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.num_inputs, self.num_states, self.num_outputs


def _integrate_and_fire(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + x
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    return core


def _lif(spike: Spike, parameters: list[Tensor], *, soft: bool, detach: bool) -> Callable[..., Any]:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) / 2.0
        s = spike(h - 1.0)
        reset = s.detach() if detach else s
        return s, h - reset if soft else h * (1.0 - reset)

    return core


def _plif(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    (w,) = parameters

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * torch.sigmoid(w)
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    return core


def _alif(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    beta, tau = parameters

    def core(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + (x - v) / 2.0
        s = spike(h - (1.0 + beta * a))
        return s, h * (1.0 - s), torch.exp(-1.0 / tau.abs()).unsqueeze(-1) * a + s

    return core


def _izhikevich(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    def core(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + (x + (v + 0.1) * (v - 0.8) - w) / 2.0
        u = w + (0.3 * (h + 0.1) - w) / 2.0
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h, u + 0.2 * s

    return core


def _two_in_two_out(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    (gain,) = parameters

    def core(x: Tensor, y: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        current = 0.5 * i + x * gain
        h = 0.75 * v + current - torch.tanh(y)
        s = spike(h - 0.5)
        return s, h, current, h - 0.5 * s

    return core


CASES = (
    Case("if", 1, 1, 1, _integrate_and_fire),
    Case("lif_hard", 1, 1, 1, partial(_lif, soft=False, detach=False)),
    Case("lif_soft", 1, 1, 1, partial(_lif, soft=True, detach=False)),
    Case("lif_hard_detached", 1, 1, 1, partial(_lif, soft=False, detach=True), smooth=False),
    Case("lif_soft_detached", 1, 1, 1, partial(_lif, soft=True, detach=True), smooth=False),
    Case("plif_scalar", 1, 1, 1, _plif, lambda step: [()], exact_on_cpu=False),
    Case("plif_channel", 1, 1, 1, _plif, lambda step: [step[-1:]], exact_on_cpu=False),
    Case("plif_neuron", 1, 1, 1, _plif, lambda step: [step], exact_on_cpu=False),
    Case("alif", 1, 2, 1, _alif, lambda step: [step[-1:], step[:1]], exact_on_cpu=False),
    Case("izhikevich", 1, 2, 1, _izhikevich),
    Case("two_in_two_out", 2, 2, 2, _two_in_two_out, lambda step: [step[-1:]], exact_on_cpu=False),
)


@dataclass(frozen=True)
class Problem:
    """A case with data: `inputs`, `states` and `parameters` are leaves that require gradients."""

    core: Callable[..., Any]
    counts: tuple[int, int, int]
    inputs: list[Tensor]
    states: list[Tensor]
    parameters: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.inputs, *self.states, *self.parameters]


def problem(
    case: Case,
    steps: int,
    step: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spike: Spike = hard_spike,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], shift: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) + shift
        return values.to(device=device, dtype=dtype).requires_grad_()

    inputs = [random((steps, *step), 0.6) for _ in range(case.num_inputs)]
    states = [random(step) for _ in range(case.num_states)]
    parameters = [random(shape, 1.0) for shape in case.parameters(step)]
    return Problem(case.make(spike, parameters), case.counts, inputs, states, parameters)
