"""Current-based leaky integrate and fire."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from flexsn_nn.neuron._reset import RECT, ImmediateReset, SpikeFunction, SpikeOptions


class CUBALIF(ImmediateReset):
    """`i' = c_decay i + x`; `h = v_decay v + i'`, with the threshold and reset of `ImmediateReset`.

    Args:
        c_decay: factor of the synaptic current `i` per step, in `[0, 1]`.
        v_decay: factor of the membrane per step, in `[0, 1]`.
        v_threshold, v_reset, surrogate_function, detach_reset, options: same as in `ImmediateReset`.

    Both decays are numbers, tensors that broadcast to the step, or `nn.Parameter`s.
    """

    state_names: ClassVar[tuple[str, ...]] = ("i", "v")
    c_decay: float | Tensor
    v_decay: float | Tensor

    def __init__(
        self,
        c_decay: float | Tensor = 0.5,
        v_decay: float | Tensor = 0.75,
        v_threshold: float | Tensor = 0.5,
        v_reset: float | None = 0.0,
        surrogate_function: SpikeFunction = RECT,
        detach_reset: bool = False,
        **options: Unpack[SpikeOptions],
    ) -> None:
        super().__init__(v_threshold, v_reset, surrogate_function, detach_reset, **options)
        self.hold_number("c_decay", c_decay, at_least=0, at_most=1)
        self.hold_number("v_decay", v_decay, at_least=0, at_most=1)

    def dynamics(self, x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Computes one step: `(spike, i, v)`."""
        current = self.bounded("c_decay", self.c_decay, i) * i + x
        h = self.bounded("v_decay", self.v_decay, v) * v + current
        spike = self.fire(h)
        return spike, current, self.after(h, spike)
