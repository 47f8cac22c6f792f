"""Layers without state over every step of a sequence."""

from __future__ import annotations

from torch import Tensor, nn


class OverTime(nn.Sequential):
    """Runs layers without state on `[T, B, ...]` as on one batch `[T B, ...]`: convolutions, norms, pooling.

    `nn.Linear` and other layers that take any number of leading dimensions do not need it.

    Args:
        layers: as for `nn.Sequential`.

    Example:
        >>> import torch
        >>> layer = OverTime(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2))
        >>> layer(torch.zeros(10, 2, 3, 6, 6)).shape
        torch.Size([10, 2, 8, 2, 2])
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, ...] -> [T, B, ...]`."""
        folded = x.flatten(0, 1)
        for layer in self:
            folded = layer(folded)
        return folded.reshape(*x.shape[:2], *folded.shape[1:])
