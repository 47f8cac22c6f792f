"""Dropout with one mask for all steps."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn._checks import check_number, check_tensor
from flexsn_nn._stateful import Stateful, check_floating
from flexsn_nn.errors import StateError
from flexsn_nn.noise._numbers import Numbers, draw_all


class SharedDropout(Stateful):
    """Dropout that drops the same elements at every step of a sequence, and scales other elements by `1 / (1 - p)`.

    The mask is drawn in the first call in training mode, from the random numbers of `flexsn_nn.random`, and kept until
    `reset()`. In evaluation mode, no elements are dropped.

    Args:
        p: probability that an element is dropped, in `[0, 1)`.
        channels: True to drop whole channels of steps `[B, C, ...]`.
        step_mode: `"m"` for `[T, *step]`, `"s"` for `[*step]`.

    Source: Lee et al., "Enabling spike-based backpropagation for training deep neural network architectures", 2020.
    """

    steps_apart = True

    def __init__(self, p: float = 0.5, channels: bool = False, step_mode: str = "m") -> None:
        super().__init__(step_mode)
        check_number("p", p, at_least=0, below=1)
        self.p = p
        self.channels = channels
        self._numbers = Numbers()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, *step] -> [T, *step]`, or `[*step] -> [*step]` in step mode `"s"`.

        Raises:
            StateError: the mask does not have the shape and device of the input's step.
            InputDtypeError: the layer is in training mode, and the input is not a floating-point tensor.
        """
        check_tensor("the input", x, dims=1 if self.step_mode == "m" else 0)
        if not self.training:
            return x
        check_floating("SharedDropout", x)
        step = x
        if self.step_mode == "m":
            step = x[0] if len(x) else x.new_empty(x.shape[1:])
        states = self.states
        if not states:
            self.states = states = [self._draw(step)]
        (mask,) = states
        if mask.shape != step.shape or mask.device != step.device:
            raise StateError(
                f"the mask has shape {list(mask.shape)} on {mask.device}; this input's step has {list(step.shape)} on "
                f"{step.device}. Call reset() between batches."
            )
        return x * mask.to(x.dtype)

    def _draw(self, step: Tensor) -> Tensor:
        """Draws a mask from the random numbers of `flexsn_nn.random`."""
        shape = [*step.shape[:2], *[1] * (step.dim() - 2)] if self.channels else list(step.shape)
        number = draw_all(self._numbers, shape, None, step.device, bits=24)
        return torch.ones_like(step) * (number >= self.p).to(step.dtype) / (1 - self.p)

    def initial_states(self, x: Tensor) -> list[Tensor]:
        """Returns an empty list, because evaluation needs no mask.

        Raises:
            StateError: the layer is in training mode, where the first call draws the mask.
        """
        if self.training:
            raise StateError("SharedDropout draws its mask in the first call in training: call eval() first.")
        return []

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}, step_mode={self.step_mode!r}"
