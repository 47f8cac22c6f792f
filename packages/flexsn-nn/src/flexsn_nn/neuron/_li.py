"""Leaky integrator: a membrane that never fires."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn.neuron._base import Neuron, RunOptions
from flexsn_nn.neuron._lif import TAU_HINT


class LI(Neuron):
    """`v' = v + (x - v) / tau`; without `decay_input`, `v' = v - v / tau + x`. The output is `v'`.

    Args:
        tau: time constant in steps, at least 1: a number, a tensor that broadcasts to the step, or an
            `nn.Parameter`.
        decay_input: True to also divide the input by `tau`.
        options: same as in `Neuron`.
    """

    tau: float | Tensor
    decay_input: bool

    def __init__(self, tau: float | Tensor = 2.0, decay_input: bool = True, **options: Unpack[RunOptions]) -> None:
        super().__init__(**options)
        self.hold_number("tau", tau, at_least=1, hint=TAU_HINT)
        self.hold("decay_input", decay_input)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(v, v)`."""
        tau = self.bounded("tau", self.tau, v)
        h = v + (x - v) / tau if self.decay_input else v - v / tau + x
        return h, h


NonSpikingLIF = LI
