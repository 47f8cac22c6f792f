"""Neurons with positive and negative spikes."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn._checks import check_number
from flexsn_nn.neuron._if import IF
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions

HINT = "Spikes of both signs need a threshold on each side of 0."


class TernaryIF(IF):
    """`h = v + x`; `s = step(h - v_threshold) - step(-h - v_threshold)`, which is -1, 0 or 1.

    The soft reset is `v' = h - s v_threshold`. The hard reset sets `v'` to `v_reset` after a spike of either sign.

    Args:
        v_threshold: threshold, above 0.
        v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Source: Guo et al., "Ternary spike: learning ternary spikes for spiking neural networks", AAAI 2024.
    """

    def __init__(
        self,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        check_number("v_threshold", v_threshold, above=0, hint=HINT)
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        return fire_both_ways(self, v + x)

    def _own_spike_range(self) -> tuple[int, int] | None:
        return _add_negative_range(super()._own_spike_range())


class TernaryLIF(LIF):
    """`h = v + (x - (v - v_reset)) / tau`; `s = step(h - v_threshold) - step(-h - v_threshold)`: -1, 0 or 1.

    The neuron is a `LIF` with the spikes and resets of `TernaryIF`.

    Args:
        tau, decay_input: same as in `LIF`.
        v_threshold: threshold, above 0.
        v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Source: Guo et al., "Ternary spike: learning ternary spikes for spiking neural networks", AAAI 2024.
    """

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
        check_number("v_threshold", v_threshold, above=0, hint=HINT)
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        return fire_both_ways(self, self.charge(x, v))

    def _own_spike_range(self) -> tuple[int, int] | None:
        return _add_negative_range(super()._own_spike_range())


def fire_both_ways(neuron: ImmediateReset, h: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `(spike, v)` from the charged membrane `h`, with a threshold on each side of 0."""
    up, down = neuron.fire(h), neuron.fire(-h)
    spike = up - down
    return spike, neuron.after(h, spike if neuron.v_reset is None else up + down)


def _add_negative_range(spikes: tuple[int, int] | None) -> tuple[int, int] | None:
    return None if spikes is None else (-spikes[1], spikes[1])
