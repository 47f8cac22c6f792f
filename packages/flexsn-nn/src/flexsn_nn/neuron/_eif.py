"""Exponential integrate and fire."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions


class EIF(ImmediateReset):
    """`h = v + (x + v_rest - v + delta_T exp((v - theta_rh) / delta_T)) / tau`.

    The threshold and reset are those of `ImmediateReset`.

    Args:
        tau: time constant in steps, above 0.
        delta_T: scale of the membrane in the exponential upstroke, above 0. A smaller scale makes the upstroke steeper.
        theta_rh: membrane value at which the upstroke begins.
        v_threshold: same as in `ImmediateReset`.
        v_rest: membrane value at rest.
        v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    `tau`, `delta_T`, `theta_rh` and `v_rest` are numbers, tensors that broadcast to the step, or
    `nn.Parameter`s.
    """

    tau: float | Tensor
    delta_T: float | Tensor
    theta_rh: float | Tensor
    v_rest: float | Tensor

    def __init__(
        self,
        tau: float | Tensor = 2.0,
        delta_T: float | Tensor = 1.0,
        theta_rh: float | Tensor = 0.8,
        v_threshold: float | Tensor = 1.0,
        v_rest: float | Tensor = 0.0,
        v_reset: float | None = -0.1,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("tau", tau, above=0)
        self.hold_number("delta_T", delta_T, above=0)
        self.hold_number("theta_rh", theta_rh)
        self.hold_number("v_rest", v_rest)

    def current(self, x: Tensor, v: Tensor) -> Tensor:
        """Computes the current that drives the membrane: input, leak and the exponential upstroke."""
        delta_T = self.bounded("delta_T", self.delta_T, v)
        upstroke = delta_T * fit(torch.exp((v - fit(self.theta_rh, v)) / delta_T), v)
        return x + fit(self.v_rest, v) - v + upstroke

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        h = v + self.current(x, v) / self.bounded("tau", self.tau, v)
        spike = self.fire(h)
        return spike, self.after(h, spike)
