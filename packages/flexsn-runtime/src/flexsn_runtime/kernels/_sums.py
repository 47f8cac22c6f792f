"""Reduces gradients from the shapes that a kernel writes to the shapes of their tensors, which may be smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_hop.formats import contiguous_strides
from flexsn_runtime.calls._plan import Allocation, PlanStep, Summed, SummedTogether
from flexsn_runtime.launches._sum import ALIGNED, PlainSum, Sum
from flexsn_runtime.operands._order import in_order, unusual_order


class LiftedGradient:
    """Sums the gradients of all elements of the step that read the same element of a captured tensor.

    Args:
        written: shape of the gradient that the kernel writes: `[programs]`, the shape of the step, or the shape of a
            row of the step (`Rows`), in the order in which the kernel counts elements.
        tensor: the captured tensor, or another tensor with its layout.
        layout: layout in which the step or the row reads the tensor, with dimensions in the same order; `None` if no
            result depends on the tensor.
        by_program: True if `written` is `[programs]`.
    """

    def __init__(
        self, written: Sequence[int], tensor: Tensor, layout: LiftedLayout | None, *, by_program: bool
    ) -> None:
        self._layout, self._order = layout, unusual_order(tensor)
        if layout is None:
            return
        self._shape: tuple[int, ...] = (1,) * len(layout.strides)
        self._sum = Sum(((None, ()),))
        if not by_program:
            dims = [d for d, stride in enumerate(layout.strides) if stride == 0 and written[d] > 1]
            self._shape = tuple(1 if d in dims else size for d, size in enumerate(written))
            self._sum = sum_over(written, dims)
        # True if the step reads all elements in memory order.
        self._all_in_order = math.prod(self._shape) == tensor.numel() and all(
            size == 1 or read_stride == usual_stride
            for size, read_stride, usual_stride in zip(
                self._shape, layout.strides, contiguous_strides(self._shape), strict=True
            )
        )

    def __call__(self, written: Tensor, tensor: Tensor) -> Tensor:
        """Returns the gradient of the captured tensor.

        The order of summation is fixed, so that two runs agree to the last bit.
        """
        if self._layout is None:
            gradient = tensor.new_zeros(tensor.shape)
        elif self._all_in_order:
            gradient = self._sum(written).view(tensor.shape)
        else:
            gradient = torch.zeros(tensor.shape, dtype=written.dtype, device=written.device)
            # The gradient is written through the same view through which the step reads the tensor.
            read = gradient.as_strided(self._shape, self._layout.strides, self._layout.offset)
            read.copy_(self._sum(written).view(self._shape))
        if gradient.dtype is not tensor.dtype or gradient.device != tensor.device:
            gradient = gradient.to(dtype=tensor.dtype, device=tensor.device)
        ordered_gradient = in_order(gradient, self._order)
        assert ordered_gradient is not None
        return ordered_gradient

    def plain(self, tensor: Tensor) -> PlainSum | None:
        """Returns the sum as data if the gradient needs no other operation than this sum; otherwise `None`."""
        if self._layout is None or not self._all_in_order or self._order is not None:
            return None
        return PlainSum(self._sum, tuple(tensor.shape), tensor.dtype)


def summed_together(num_arguments: int, sums: Sequence[tuple[Allocation, Summed]]) -> list[PlanStep]:
    """Returns the plan steps that sum gradients. Equal sums are combined into one step.

    Args:
        num_arguments: number of tensors that a call takes.
        sums: the sums, each with the allocation of the gradient that is summed.
    """
    groups: dict[tuple[Allocation, PlainSum | None], list[Summed]] = {}
    for written, step in sums:
        groups.setdefault((written, step.plain), []).append(step)
    steps: list[PlanStep] = []
    for (written, plain), group in groups.items():
        bytes_each = math.prod(written.shape) * written.dtype.itemsize
        combined = None if plain is None or len(group) == 1 or bytes_each % ALIGNED else plain.times(len(group))
        if combined is None:
            steps += group
        else:
            shape = (len(group), *written.shape)
            results = tuple(step.place - num_arguments for step in group)
            memory = Allocation(shape, contiguous_strides(shape), written.dtype)
            steps.append(SummedTogether(num_arguments, results, memory, combined))
    return steps


# On an H200, torch sums the columns of a large matrix three times as fast with 2048 columns as with 128.
_COLUMNS = 2048
_LARGE = 2**20  # elements


def sum_over(shape: Sequence[int], dims: Sequence[int]) -> Sum:
    """Returns a `Sum` that computes `tensor.sum(dims)` for a contiguous tensor. The result may have another shape.

    Args:
        shape: the tensor's shape.
        dims: dimensions to sum over. Without dimensions, the result has the elements of the tensor itself.
    """
    if not dims:
        return Sum(())
    count, summed_dims = len(dims), tuple(dims)
    if summed_dims != tuple(range(count)):
        return Sum(_split_planes(tuple(shape), summed_dims))
    rows, columns = math.prod(shape[:count]), math.prod(shape[count:])
    # A compiler arranges sums over symbolic sizes itself.
    side_by_side = 1
    if isinstance(rows, int) and isinstance(columns, int) and rows * columns >= _LARGE and columns < _COLUMNS:
        side_by_side = math.gcd(rows, _COLUMNS // columns)
    if side_by_side != 1:
        return Sum((((-1, side_by_side * columns), (0,)), ((side_by_side, columns), (0,))))
    return Sum(((None if count == 1 else (-1, columns), (0,)),))


# In torch, one warp adds up each plane of fewer than 8192 elements. On an H100, two such sums over [6, 128, 784] took a
# fifth of the total time of a norm and a neuron. The planes are therefore split into rows that are short enough for a
# warp, and the few sums of the rows are summed again.
_FEW, _MANY = 1024, 8192
_MOST_OF_ROW, _LEAST_OF_ROW = 512, 32


def _split_planes(
    shape: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]:
    """Returns the steps of a sum over dimensions other than the leading dimensions."""
    single_sum = ((None, dims),)
    if not all(type(size) is int for size in shape):
        return single_sum
    count = next((i for i in range(len(shape)) if len(shape) - 1 - i not in dims), len(shape))
    outer, plane = shape[: len(shape) - count], math.prod(shape[len(shape) - count :])
    if not _FEW < math.prod(shape[d] for d in dims) < _MANY:
        return single_sum
    row = next(size for size in range(min(plane, _MOST_OF_ROW), 0, -1) if plane % size == 0)
    if row < _LEAST_OF_ROW:
        return single_sum
    remaining = (*(d for d in dims if d < len(outer)), len(outer))
    return ((-1, row), (1,)), ((*outer, plane // row), remaining)


class InputGradient:
    """Sums over the dimensions in which an input broadcasts to the step.

    Args:
        tensor: the input, or another tensor with its layout.
        by_program: True if the kernel writes `[T, programs]`, False if it writes `[T, *step]`.
    """

    def __init__(self, tensor: Tensor, *, by_program: bool) -> None:
        self._order, self._by_program = unusual_order(tensor), by_program

    def __call__(self, written: Tensor, tensor: Tensor) -> Tensor:
        """Returns the gradient of the input."""
        summed = input_gradient(written, tensor, self._by_program)
        ordered_gradient = in_order(summed, self._order)
        assert ordered_gradient is not None
        return ordered_gradient


def input_gradient(gradient: Tensor, tensor: Tensor, by_program: bool) -> Tensor:
    """Returns the gradient of an input, with its dimensions in the usual order in memory."""
    shape = tensor.shape
    if by_program:
        return gradient.sum(1).reshape(shape).to(tensor.dtype)
    lead = gradient.dim() - len(shape)
    # The input may have fewer dimensions after T than the step.
    expanded_shape = (shape[0], *(1,) * lead, *shape[1:])
    summed_dims = [d for d, (g, s) in enumerate(zip(gradient.shape, expanded_shape, strict=True)) if s == 1 and g != 1]
    return (gradient.sum(summed_dims, keepdim=True) if summed_dims else gradient).reshape(shape)
