"""A delay of the first input in the step's kernels, which load earlier steps and write gradients to them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexsn_nn.transforms._transform import Call, Changed, Core, Own, Transform, Values, layout_of

if TYPE_CHECKING:
    from flexsn_nn._delay import Delay


class Delayed(Transform):
    """A `Delay` in a call without earlier inputs.

    The delay runs in kernels that can load earlier steps; otherwise, it runs before the step.

    For a delay that is not a whole number, the step receives `x[t - floor(delay)]`, keeps the previous such value as a
    state, and interpolates between the two values. The gradient of a learned delay is a sum over time, as for any
    captured tensor.

    Args:
        layer: delay layer.
    """

    num_inputs = 1
    starts_at_zero = True

    def __init__(self, layer: Delay) -> None:
        self.layer = layer
        self.num_states = int(layer.is_between)
        self.looks_back = layer.max_delay - layer.is_between

    @property
    def key(self) -> Hashable:
        """Key: the largest delay, whether the step interpolates, the delay or its tensor's layout, and `learned`."""
        layer = self.layer
        delay = layout_of(self.tensors) if isinstance(layer.delay, Tensor) else layer.delay
        return layer.max_delay, layer.is_between, delay, self.learned

    @property
    def tensors(self) -> Values:
        """Tensor of delays, if the step interpolates with it."""
        delay = self.layer.delay
        return (delay,) if isinstance(delay, Tensor) and self.num_states else ()

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each tensor, True if a gradient flows to it."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    def before(self, call: Call) -> tuple[Values, Transform | None]:
        """Returns the delayed sequence, unless kernels delay it."""
        x, *others = call.inputs
        fits = x.shape[1:] == call.step_shape and x[0].numel() > 1 and self.layer.fits(x)
        if call.delays and fits and not others:  # the gradients of other inputs would be summed over different steps
            return call.inputs, self
        return (self.layer.of(x), *others), None

    def inputs(self, call: Call) -> Sequence[Tensor]:
        """Returns the delays in steps. Kernels round tensors of delays down; a number is rounded down here."""
        x, delay = call.inputs[0], self.layer.steps_back()
        if not isinstance(delay, Tensor):
            return (torch.full((), float(math.floor(delay)), device=x.device).expand(len(x)),)
        return (delay.expand(len(x), *delay.shape),)

    def states(self, call: Call) -> Sequence[Tensor]:
        """Returns zeros, the value before the first step, if the step interpolates; otherwise nothing."""
        return tuple([torch.zeros_like(call.inputs[0][0]) for _ in range(self.num_states)])

    def step(self, core: Core, inputs: Values, states: Values, own: Own) -> Changed:
        """Calls `core` with the delayed input, interpolated between two steps if the delay is not a whole number."""
        x = inputs[0]
        y = self.layer.between(x, *own.states, *own.tensors)
        return Changed(*core((y, *inputs[1:]), states), own_states=(x,) * self.num_states)
