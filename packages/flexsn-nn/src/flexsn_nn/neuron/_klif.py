"""Leaky integrate and fire with a learned slope."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from flexsn_nn._checks import check_number
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class KLIF(LIF):
    """`h = relu(k (v + (x - (v - v_reset)) / tau))` with learned `k`, and the threshold and reset of `ImmediateReset`.

    Without `decay_input`, `k` multiplies the formula for `h` that `LIF` uses without `decay_input`. With `scale_reset`,
    the reset uses `h / k` and `v_threshold / k`, so that the membrane keeps its scale.

    Args:
        scale_reset: True to reset with `h / k` and `v_threshold / k`.
        tau, decay_input: same as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset: same as in `ImmediateReset`.
        init_k: initial value of `k`, above 0; or a tensor of values that broadcasts to the step.
        options: same as in `ImmediateReset`.

    Source: Jiang and Zhang, "KLIF: an optimized spiking neuron unit", 2023.
    """

    scale_reset: bool
    k: nn.Parameter

    def __init__(
        self,
        scale_reset: bool = False,
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        init_k: float | Tensor = 1.0,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)
        check_number("init_k", init_k, above=0)
        self.hold("scale_reset", scale_reset)
        self.hold_number("k", init_k, learn=True, above=0)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        k = self.bounded("k", self.k, v)
        h = torch.relu(k * self.charge(x, v))
        spike = self.fire(h)
        if self.scale_reset:
            return spike, self.after(h / k, spike, fit(self._get_threshold(h, None) / k, h))
        return spike, self.after(h, spike)
