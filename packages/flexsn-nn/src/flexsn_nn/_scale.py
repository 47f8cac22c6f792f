"""Multiplication by constants, as a layer."""

from __future__ import annotations

from torch import Tensor, nn


class Scale(nn.Module):
    """`x * scale`.

    Args:
        scale: factor that broadcasts to the step.
    """

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, *step] -> [T, B, *step]`."""
        return x * self.scale
