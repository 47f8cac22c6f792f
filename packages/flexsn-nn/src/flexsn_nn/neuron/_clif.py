"""Complementary leaky integrate and fire."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import TAU_HINT
from flexsn_nn.neuron._reset import RECT, ImmediateReset, SpikeFunction, SpikeOptions


class CLIF(ImmediateReset):
    """`h = v - v / tau + x`; `m' = m sigmoid(h / tau) + s`; `v' = h - s (v_threshold + sigmoid(m'))`.

    The neuron is a `LIF` with a complementary potential `m`, which records recent spikes. The more often the neuron has
    fired recently, the deeper the next reset is. The gradient of `m` reaches further back in time than the membrane's
    gradient, which vanishes.

    Args:
        tau: time constant in steps, at least 1: a number, a tensor that broadcasts to the step, or an
            `nn.Parameter`.
        v_threshold, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Source: Huang et al., "CLIF: complementary leaky integrate-and-fire neuron for spiking neural networks",
    ICML 2024.
    """

    state_names: ClassVar[tuple[str, ...]] = ("v", "m")
    tau: float | Tensor

    def __init__(
        self,
        tau: float | Tensor = 2.0,
        v_threshold: float | Tensor = 1.0,
        surrogate_function: SpikeFunction = RECT,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, None, surrogate_function, detach_reset, **options)
        self.hold_number("tau", tau, at_least=1, hint=TAU_HINT)

    def dynamics(self, x: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v, m)`."""
        tau = self.bounded("tau", self.tau, v)
        h = v - v / tau + x
        spike = self.fire(h)
        m = m * torch.sigmoid(h / tau) + spike
        return spike, self.after(h, spike, fit(self.v_threshold, h) + torch.sigmoid(m)), m
