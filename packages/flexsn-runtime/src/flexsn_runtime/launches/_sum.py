"""Sums of values that a kernel has written, described as data.

Both Python and the compiled launcher compute these sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 16
"""Alignment in bytes. Kernels are compiled for tensors whose addresses are multiples of this number."""


class Sum(NamedTuple):
    """Sums over dimensions of a tensor.

    Attributes:
        steps: pairs of a shape and dimensions. A step views the tensor in this shape, and sums over these dimensions.
            If the shape is `None`, the tensor keeps its shape. If the dimensions are empty, the sum is over all
            dimensions.
    """

    steps: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the sums of a contiguous tensor. The result may have any shape."""
        for shape, dims in self.steps:
            view = tensor if shape is None else tensor.view(shape)
            tensor = view.sum(dims) if dims else view.sum()
        return tensor


class PlainSum(NamedTuple):
    """The sum `sum(tensor).view(shape).to(dtype)`."""

    sum: Sum
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the sums of a contiguous tensor."""
        return self.sum(tensor).view(self.shape).to(self.dtype)

    def times(self, count: int) -> PlainSum | None:
        """Returns one sum for `count` stacked tensors. It maps a tensor `[count, ...]` to the sums `[count, *shape]`.

        Returns `None` if this sum reduces no dimension or all dimensions, or if the stacked sums would not have the
        alignment of separate tensors.
        """
        if not self.sum.steps or not all(dims for _, dims in self.sum.steps):
            return None
        if math.prod(self.shape) * self.dtype.itemsize % ALIGNED:
            return None
        steps = []
        for shape, dims in self.sum.steps:
            steps.append((None if shape is None else (count, *shape), tuple(dim + 1 for dim in dims)))
        return PlainSum(Sum(tuple(steps)), (count, *self.shape), self.dtype)
