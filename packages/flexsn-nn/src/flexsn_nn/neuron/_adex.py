"""Adaptive exponential integrate and fire."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._eif import EIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class AdEx(EIF):
    """`h = v + (x + v_rest - v + delta_T exp((v - theta_rh) / delta_T) - w) / tau`, with adaptation `w`.

    `w' = w + (a (v - v_rest) - w) / tau_w + b s`. The neuron is an `EIF` with an adaptation current `w`, which follows
    the membrane and jumps at each spike. `v` is reset as in `ImmediateReset`.

    Args:
        tau, delta_T, theta_rh, v_threshold, v_rest, v_reset: same as in `EIF`.
        tau_w: time constant of `w` in steps, above 0.
        a: strength with which `w` follows the membrane.
        b: amount that a spike adds to `w`.
        surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Each numeric parameter except `v_reset` is a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "w")
    tau_w: float | Tensor
    a: float | Tensor
    b: float | Tensor

    def __init__(
        self,
        tau: float | Tensor = 2.0,
        delta_T: float | Tensor = 1.0,
        theta_rh: float | Tensor = 0.8,
        v_threshold: float | Tensor = 1.0,
        v_rest: float | Tensor = 0.0,
        v_reset: float | None = -0.1,
        tau_w: float | Tensor = 2.0,
        a: float | Tensor = 0.0,
        b: float | Tensor = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(
            tau, delta_T, theta_rh, v_threshold, v_rest, v_reset, surrogate_function, detach_reset, **options
        )
        self.hold_number("tau_w", tau_w, above=0)
        self.hold_number("a", a)
        self.hold_number("b", b)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, w)`."""
        v, w = states
        h = v + (self.current(x, v) - w) / self.bounded("tau", self.tau, v)
        spike = self.fire(h)
        adaptation = (fit(self.a, v) * (v - fit(self.v_rest, v)) - w) / self.bounded("tau_w", self.tau_w, v)
        return spike, self.after(h, spike), w + adaptation + fit(self.b, v) * spike
