"""Integrate and fire."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from flexsn_nn.neuron._reset import SIGMOID, ImmediateReset, SpikeFunction, SpikeOptions


class IF(ImmediateReset):
    """`h = v + x`, with the threshold and reset of `ImmediateReset`.

    Args:
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Example:
        >>> IF()(torch.full((4, 1), 0.5)).flatten().tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        v_threshold: float | Tensor = 1.0,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = SIGMOID,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, v)`."""
        h = v + x
        spike = self.fire(h)
        return spike, self.after(h, spike)
