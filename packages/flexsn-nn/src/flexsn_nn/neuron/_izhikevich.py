"""Izhikevich's neuron: quadratic, with adaptation."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn._checks import check_number
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions


class Izhikevich(ImmediateReset):
    """A quadratic neuron with an adaptation current `w`, which follows the membrane and jumps at each spike.

        h = v + (x + a0 (v - v_rest) (v - v_c) - w) / tau
        w' = w + (a (h - v_rest) - w) / tau_w + b s

    Then `ImmediateReset` of `v`.

    Args:
        tau: time constant in steps, above 0.
        v_c: above this membrane the neuron runs up to a spike by itself.
        a0: strength of that, above 0.
        v_threshold, v_reset: as in `ImmediateReset`.
        v_rest: the membrane at rest.
        tau_w: time constant of `w` in steps, above 0.
        a: how much `w` follows the membrane.
        b: how much a spike adds to `w`.
        surrogate_function, detach_reset, options: as in `ImmediateReset`.

    All but `v_reset` are numbers, tensors that broadcast to the step, or `nn.Parameter`s.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "w")
    tau: float | Tensor
    v_c: float | Tensor
    a0: float | Tensor
    v_rest: float | Tensor
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
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        check_number("tau", tau, above=0)
        check_number("a0", a0, above=0)
        check_number("tau_w", tau_w, above=0)
        for name, value in {"v_c": v_c, "v_rest": v_rest, "a": a, "b": b}.items():
            check_number(name, value)
        self.hold("tau", tau)
        self.hold("v_c", v_c)
        self.hold("a0", a0)
        self.hold("v_rest", v_rest)
        self.hold("tau_w", tau_w)
        self.hold("a", a)
        self.hold("b", b)

    def dynamics(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        """One step: `(spike, v, w)`."""
        v_rest = fit(self.v_rest, v)
        growth = fit(self.a0, v) * (v - v_rest) * (v - fit(self.v_c, v))
        h = v + (x + growth - w) / fit(self.tau, v)
        spike = self.fire(h)
        follow = (fit(self.a, v) * (h - v_rest) - w) / fit(self.tau_w, v)
        return spike, self.after(h, spike), w + follow + fit(self.b, v) * spike
