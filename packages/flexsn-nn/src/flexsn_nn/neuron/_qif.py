"""Quadratic integrate and fire."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions


class QIF(ImmediateReset):
    """`h = v + (x + a0 (v - v_rest) (v - v_c)) / tau`, with the threshold and reset of `ImmediateReset`.

    Args:
        tau: time constant in steps, above 0.
        v_c: membrane value above which the neuron spikes without further input.
        a0: strength of the quadratic upstroke, above 0.
        v_threshold: same as in `ImmediateReset`.
        v_rest: membrane value at rest.
        v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    `tau`, `v_c`, `a0` and `v_rest` are numbers, tensors that broadcast to the step, or `nn.Parameter`s.
    """

    tau: float | Tensor
    v_c: float | Tensor
    a0: float | Tensor
    v_rest: float | Tensor

    def __init__(
        self,
        tau: float | Tensor = 2.0,
        v_c: float | Tensor = 0.8,
        a0: float | Tensor = 1.0,
        v_threshold: float | Tensor = 1.0,
        v_rest: float | Tensor = 0.0,
        v_reset: float | None = -0.1,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("tau", tau, above=0)
        self.hold_number("v_c", v_c)
        self.hold_number("a0", a0, above=0, finite=True)
        self.hold_number("v_rest", v_rest)

    def current(self, x: Tensor, v: Tensor) -> Tensor:
        """Computes the current that drives the membrane: the input and the quadratic upstroke."""
        return x + self.bounded("a0", self.a0, v) * (v - fit(self.v_rest, v)) * (v - fit(self.v_c, v))

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        h = v + self.current(x, v) / self.bounded("tau", self.tau, v)
        spike = self.fire(h)
        return spike, self.after(h, spike)
