"""A layer that multiplies its input by constants."""

from __future__ import annotations

from torch import Tensor, nn


class Scale(nn.Module):
    """A layer that computes `x * scale`.

    Args:
        scale: factor that broadcasts to the step.
    """

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[T, B, *step] -> [T, B, *step]`."""
        return x * self.scale
