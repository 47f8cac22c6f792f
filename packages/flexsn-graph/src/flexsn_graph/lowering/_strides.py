"""Arithmetic on positions in the step. The strides of tensors without data represent the positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexsn_graph.ir._layout import LiftedLayout


class StepAxes:
    """The shape of one step as a strided tensor. Positions are relative to this tensor.

    Attributes:
        shape: shape of the step.
        varying: the axes that have more than one element.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.varying = frozenset(a for a, size in enumerate(self.shape) if size > 1)
        self._strides = contiguous(self.shape).stride()

    def place(self, shape: Sequence[int]) -> Tensor:
        """The positions in the step of a value of shape `shape`, whose last dimension is the step's last axis."""
        sizes = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
        extra = len(sizes) - len(self.shape)
        strides = [0] * extra + [
            stride if size == full and size > 1 else 0
            for size, full, stride in zip(sizes[extra:], self.shape, self._strides, strict=True)
        ]
        return torch.empty_strided(shape, strides[len(sizes) - len(shape) :], device="meta")

    def reaches(self, shape: tuple[int, ...]) -> bool:
        """True if an argument of shape `shape` broadcasts to the step. Leading sizes of 1 do not matter."""
        extra = max(0, len(shape) - len(self.shape))
        return numel(shape[:extra]) == 1 and broadcast_shapes([shape[extra:], self.shape]) == self.shape

    def axes_of(self, step: Tensor, dim: int) -> Iterator[int]:
        """The axes of the step along which the dimension `dim` of a value at the positions `step` varies."""
        size, stride = step.shape[dim], step.stride(dim)
        for axis in self.varying if size > 1 and stride > 0 else ():
            axis_stride = self._strides[axis]
            if stride < axis_stride * self.shape[axis] and axis_stride < stride * size:
                yield axis

    def layout(self, step: Tensor, elements: Tensor) -> LiftedLayout | None:
        """The layout of a tensor whose `elements` are at the positions `step`. `None` if no strides describe it."""
        dims = [d for d, size in enumerate(elements.shape) if size > 1 and (elements.stride(d) or step.stride(d))]
        dims.sort(key=step.stride, reverse=True)
        axes = sorted({a for d in dims for a in self.axes_of(step, d)})
        sizes = [self.shape[a] for a in axes]
        try:
            result, strides = (_pick(t, dims).view(sizes).stride() for t in (step, elements))
        except RuntimeError:
            return None
        if result != tuple(self._strides[a] for a in axes):
            return None
        by_axis = dict(zip(axes, strides, strict=True))
        all_strides = tuple(by_axis.get(a, 0) for a in range(len(self.shape)))
        return LiftedLayout(all_strides, int(elements.storage_offset()))


def contiguous(shape: Sequence[int]) -> Tensor:
    """A tensor without data whose elements have distinct positions in ascending order."""
    return torch.empty(tuple(shape), device="meta")


def drop_dims(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The first slice of the tensor in each dimension of `dims`. These dimensions are removed."""
    for d in sorted(dims, reverse=True):
        tensor = tensor.select(d, 0)
    return tensor


def is_compatible(step: Tensor, place: Tensor) -> bool:
    """True if a value at positions `step` may be at positions `place`: it is constant where the positions differ."""
    return all(
        size <= 1 or stride in (0, requested)
        for size, stride, requested in zip(step.shape, step.stride(), place.stride(), strict=True)
    )


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The shape to which `shapes` broadcast, or `None` if they do not broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def numel(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of this shape."""
    return int(torch.Size(shape).numel())


def _pick(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    return torch.empty_strided([tensor.shape[d] for d in dims], [tensor.stride(d) for d in dims], device="meta")
