"""Leaky integrate and analog fire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from torch import Tensor

from flexsn_nn._checks import check_function
from flexsn_nn.neuron._base import fit
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._reset import SIGMOID, SpikeFunction, SpikeOptions


class LIAF(LIF):
    """`h = v + (x - (v - v_reset)) / tau`; the output is `act(h)` or `act(h - v_threshold)`.

    The spike of `LIF` only resets the membrane, and is not returned.

    Args:
        act: elementwise activation function, for example `torch.relu`.
        threshold_related: True if `act` receives `h - v_threshold`, False if it receives `h`.
        tau, decay_input: same as in `LIF`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Source: Wu et al., "LIAF-Net", TNNLS 2021.
    """

    act: Callable[[Tensor], Tensor]
    threshold_related: bool

    def __init__(
        self,
        act: Callable[[Tensor], Tensor],
        threshold_related: bool,
        tau: float | Tensor = 2.0,
        decay_input: bool = True,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(tau, decay_input, v_threshold, v_reset, surrogate_function, detach_reset, **options)
        check_function("act", act)
        self.hold("act", act)
        self.hold("threshold_related", threshold_related)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(output, v)`."""
        h = self.charge(x, v)
        output = self.act(h - fit(self.v_threshold, h) if self.threshold_related else h)
        return output, self.after(h, self.fire(h))

    def _own_spike_range(self) -> tuple[int, int] | None:
        return None  # `act` may return any number
