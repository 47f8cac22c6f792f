"""Leaky integrate and fire."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions

TAU_HINT = "Time constants are counted in steps."


class LIF(ImmediateReset):
    """`h = v + (x - (v - v_reset)) / tau`; without `decay_input`, `h = v - (v - v_reset) / tau + x`.

    The threshold and reset are those of `ImmediateReset`. With the soft reset, `v_reset` is 0 in these formulas.

    Args:
        tau: time constant in steps, at least 1: a number, a tensor that broadcasts to the step, or an `nn.Parameter`.
            If a learned `tau` falls below 1, the neuron uses 1 until the gradient leads `tau` back. `PLIF` learns a
            parameter without bounds instead of `tau`.
        decay_input: True to also divide the input by `tau`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Example:
        >>> LIF(tau=2.0)(torch.full((4, 1), 1.5)).flatten().tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    tau: float | Tensor
    decay_input: bool

    def __init__(
        self,
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("tau", tau, at_least=1, hint=TAU_HINT)
        self.hold("decay_input", decay_input)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        """Computes the charged membrane `h`."""
        return leaky_charge(x, v, self.bounded("tau", self.tau, v), self.decay_input, self.v_start)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        h = self.charge(x, v)
        spike = self.fire(h)
        return spike, self.after(h, spike)


def leaky_charge(x: Tensor, v: Tensor, tau: float | Tensor, decay_input: bool, v_rest: float) -> Tensor:
    """Computes the membrane of a leaky neuron after its input and before its spike."""
    if decay_input:
        return v + (x - (v - v_rest)) / tau
    return v - (v - v_rest) / tau + x
