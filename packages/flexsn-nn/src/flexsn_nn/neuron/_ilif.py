"""Integer leaky integrate and fire."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import check_count
from flexsn_nn.neuron._base import Neuron, RunOptions
from flexsn_nn.neuron._lif import TAU_HINT


class ILIF(Neuron):
    """`h = v - v / tau + x`; `s = round(clamp(h / v_threshold, 0, D))` spikes; `v' = h - s v_threshold`.

    Halves are rounded to the nearest even number. In the backward, rounding is treated as the identity.

    Args:
        tau: time constant in steps, at least 1.
        D: largest number of spikes in one step.
        v_threshold: threshold, above 0.
        detach_reset: True if the gradient does not flow through the reset to `s`.
        options: same as in `Neuron`.

    `tau` and `v_threshold` are numbers, tensors that broadcast to the step, or `nn.Parameter`s.

    Source: Luo et al., "Integer-valued training and spike-driven inference spiking neural network for
    high-performance and energy-efficient object detection", ECCV 2024.
    """

    tau: float | Tensor
    D: int
    v_threshold: float | Tensor
    detach_reset: bool

    def __init__(
        self,
        tau: float | Tensor = 4 / 3,
        D: int = 4,
        v_threshold: float | Tensor = 1.0,
        detach_reset: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(**options)
        check_count("D", D)
        self.hold_number("tau", tau, at_least=1, hint=TAU_HINT)
        self.hold("D", D)
        self.hold_number("v_threshold", v_threshold, above=0)
        self.hold("detach_reset", detach_reset)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike count, v)`."""
        threshold = self.bounded("v_threshold", self.v_threshold, v)
        h = v - v / self.bounded("tau", self.tau, v) + x
        spikes: Tensor = _round(h / threshold, self.D)
        reset_spikes = spikes.detach() if self.detach_reset else spikes
        return spikes, h - reset_spikes * threshold

    def _own_spike_range(self) -> tuple[int, int] | None:
        return (0, self.D) if type(self).dynamics is ILIF.dynamics else None


def _round(x: Tensor, maximum: int) -> Tensor:
    # Dynamo cannot trace a function with a `jvp`.
    function = _RoundFunction if torch.compiler.is_compiling() else _RoundFunctionWithJvp
    rounded: Tensor = function.apply(x, maximum)
    return rounded


class _RoundFunction(torch.autograd.Function):
    """Rounds to the nearest whole number from 0 to `maximum`. The gradient is 1 in this range, and 0 elsewhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, maximum: int) -> Tensor:
        return x.clamp(0, maximum).round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.maximum = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) & (x <= ctx.maximum), grads[0], 0.0), None


class _RoundFunctionWithJvp(_RoundFunction):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, maximum: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) & (x <= ctx.maximum), tangent, 0.0)
