"""Sums of what a kernel has written, as data: whoever computes them need not be Python."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sum(NamedTuple):
    """Sums over dimensions.

    Attributes:
        steps: shapes to see a tensor in, `None` its own, and the dimensions to sum over then; without any, all.
    """

    steps: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """The sums of a contiguous tensor, in any shape."""
        for shape, dims in self.steps:
            seen = tensor if shape is None else tensor.view(shape)
            tensor = seen.sum(dims) if dims else seen.sum()
        return tensor


class PlainSum(NamedTuple):
    """`sum(written).view(shape).to(dtype)`."""

    sum: Sum
    shape: tuple[int, ...]
    dtype: torch.dtype
