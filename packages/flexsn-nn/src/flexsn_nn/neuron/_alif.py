"""Leaky integrate and fire with an adaptive threshold."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class ALIF(LIF):
    """`h = v + (x - (v - v_reset)) / tau`; `s = step(h - v_threshold - beta a)`; `a' = exp(-1 / tau_a) a + s`.

    The neuron is a `LIF` with an adaptive threshold. Each spike raises the threshold by `beta`, and this increase
    decays. The neuron is reset as in `ImmediateReset`. The soft reset subtracts the current threshold, `v_threshold +
    beta a`.

    Args:
        tau_a: time constant of the adaptation in steps, above 0.
        beta: amount by which a spike raises the threshold, at least 0.
        tau, decay_input: same as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    `tau_a` and `beta` are numbers, tensors that broadcast to the step, or `nn.Parameter`s.

    Source: Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking neurons",
    NeurIPS 2018.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "a")
    tau_a: float | Tensor
    beta: float | Tensor

    def __init__(
        self,
        tau_a: float | Tensor = 200.0,
        beta: float | Tensor = 1.8,
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("tau_a", tau_a, above=0)
        self.hold_number("beta", beta, at_least=0)

    def dynamics(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, a)`."""
        v, a = states
        tau_a = self.bounded("tau_a", self.tau_a, v)
        rho = fit(torch.exp(-1 / tau_a), v) if isinstance(tau_a, Tensor) else math.exp(-1 / tau_a)
        threshold = fit(self.v_threshold, v) + self.bounded("beta", self.beta, v) * a
        h = self.charge(x, v)
        spike = self.fire(h, threshold)
        return spike, self.after(h, spike, threshold), rho * a + spike
