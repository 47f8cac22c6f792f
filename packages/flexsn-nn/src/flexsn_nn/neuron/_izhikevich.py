"""Izhikevich's quadratic neuron with adaptation."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._qif import QIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class Izhikevich(QIF):
    """`h = v + (x + a0 (v - v_rest) (v - v_c) - w) / tau`; `w' = w + (a (h - v_rest) - w) / tau_w + b s`.

    The neuron is a `QIF` with an adaptation current `w`, which follows the membrane and jumps at each spike. `v` is
    reset as in `ImmediateReset`.

    Args:
        tau, v_c, a0, v_threshold, v_reset, v_rest: same as in `QIF`.
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
        v_c: float | Tensor = 0.8,
        a0: float | Tensor = 1.0,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        v_rest: float | Tensor = -0.1,
        tau_w: float | Tensor = 2.0,
        a: float | Tensor = 0.0,
        b: float | Tensor = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, v_c, a0, v_threshold, v_rest, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("tau_w", tau_w, above=0)
        self.hold_number("a", a)
        self.hold_number("b", b)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, w)`."""
        v, w = states
        h = v + (self.current(x, v) - w) / self.bounded("tau", self.tau, v)
        spike = self.fire(h)
        adaptation = (fit(self.a, v) * (h - fit(self.v_rest, v)) - w) / self.bounded("tau_w", self.tau_w, v)
        return spike, self.after(h, spike), w + adaptation + fit(self.b, v) * spike
