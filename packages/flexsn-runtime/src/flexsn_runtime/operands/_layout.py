"""Converts a tensor's strides to the layout in which a kernel reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexsn_codegen import DENSE, StepLayout
from flexsn_runtime.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Terms:
    """Layout of a tensor over a step, as a sum of terms.

    The offset of element `off` of the step is `Σ (off // inner % size) * stride`, or `off` if the tensor is dense.

    Attributes:
        layout: the layout that the kernel is specialized on.
        numbers: `inner, size, stride` of each term. These integers are arguments of the kernel.
    """

    layout: StepLayout
    numbers: tuple[int, ...]


DENSE_TERMS = Terms(DENSE, ())


def step_terms(shape: Sequence[int], strides: Sequence[int]) -> Terms:
    """Describes the layout of a tensor over a step.

    Args:
        shape: the step's shape.
        strides: the tensor's stride along each dimension of the step; 0 for dimensions along which the tensor
            broadcasts.
    """
    groups: list[tuple[int, int, int]] = []  # inner, size, stride, from the last dimension to the first
    inner = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if groups and _continues(groups[-1], inner, stride):
                group_inner, group_size, group_stride = groups[-1]
                groups[-1] = (group_inner, group_size * size, group_stride)
            else:
                groups.append((inner, size, stride))
        inner *= size
    terms = [group for group in groups if group[2] != 0]
    if inner == 1 or terms == [(1, inner, 1)]:
        return DENSE_TERMS
    return Terms(len(terms), tuple(number for term in terms for number in term))


def _continues(group: tuple[int, int, int], inner: int, stride: int) -> bool:
    """True if a dimension continues the dimensions after it, so that one term describes all of them."""
    group_inner, group_size, group_stride = group
    return group_inner * group_size == inner and stride == group_stride * group_size


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], step: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor with these `shape` and `strides`, expanded to the shape `step`."""
    num_missing = len(step) - len(shape)
    expanded_strides = [0] * num_missing
    for size, stride in zip(shape, strides, strict=True):
        expanded_strides.append(0 if size == 1 else stride)
    return tuple(expanded_strides)


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the shape of a step with inputs of these shapes. Raises `ShapeError` if the shapes do not broadcast."""
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes):  # torch's function takes longer than a call of the scan
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ShapeError(
            f"the inputs have steps of shape {', '.join(str(list(s)) for s in shapes)}, which do not "
            "broadcast to one: give all of them the shape of the step after T, or sizes of 1 where they broadcast."
        ) from None
