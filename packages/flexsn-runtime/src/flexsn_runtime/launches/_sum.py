"""Sums of the values that a kernel has written. They are data, which Python and the compiled launcher execute."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 16
"""Alignment in bytes. Kernels are compiled for tensors that begin at multiples of it."""


class Sum(NamedTuple):
    """Sums over dimensions of a tensor.

    Attributes:
        steps: pairs of a shape and dimensions. A step views the tensor in this shape, or as it is for `None`, and sums
        over the dimensions, or over all dimensions if the pair names none.
    """

    steps: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the sums of a contiguous tensor. They may have any shape."""
        for shape, dims in self.steps:
            seen = tensor if shape is None else tensor.view(shape)
            tensor = seen.sum(dims) if dims else seen.sum()
        return tensor


class PlainSum(NamedTuple):
    """`sum(written).view(shape).to(dtype)`."""

    sum: Sum
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the sums of a contiguous tensor."""
        return self.sum(tensor).view(self.shape).to(self.dtype)

    def times(self, count: int) -> PlainSum | None:
        """Returns one sum that computes the sums of `count` tensors, from `[count, ...]` to `[count, *shape]`.

        It is `None` if this sum reduces no dimension, or all of them, or if the results would not be aligned like
        tensors.
        """
        if not self.sum.steps or not all(dims for _, dims in self.sum.steps):
            return None
        if math.prod(self.shape) * self.dtype.itemsize % ALIGNED:
            return None
        steps = []
        for shape, dims in self.sum.steps:
            steps.append((None if shape is None else (count, *shape), tuple(dim + 1 for dim in dims)))
        return PlainSum(Sum(tuple(steps)), (count, *self.shape), self.dtype)
