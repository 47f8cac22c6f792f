"""Data of a translated function that cuts dimensions: its steps, and the parts of tensors that they read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Axis:
    """A factor of a dimension that the kernel counts. `number` is the position of the axis among the step's axes."""

    number: int


@dataclass(frozen=True, slots=True)
class Cells:
    """One cell of a factor that is written out: the cell with index `chosen` of `count` cells."""

    count: int
    chosen: int


Dimension: TypeAlias = tuple[Axis | Cells, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a kernel reads or writes.

    Attributes:
        tensor: index of the tensor among the arguments or the results.
        dimensions: the factors of each dimension, outermost first.
    """

    tensor: int
    dimensions: tuple[Dimension, ...]

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements of `tensor` in this part, as a view whose shape is `shape`, the shape of a step."""
        strides, offset = [0] * len(shape), tensor.storage_offset()
        for dimension, stride in zip(self.dimensions, tensor.stride(), strict=True):
            for factor in reversed(dimension):
                if isinstance(factor, Cells):
                    offset += factor.chosen * stride
                    stride *= factor.count
                else:
                    strides[factor.number] += stride
                    stride *= shape[factor.number]
        return tensor.as_strided(tuple(shape), strides, offset)


@dataclass(frozen=True, slots=True)
class CellResult:
    """A result of a function that cuts dimensions into pieces.

    Attributes:
        step: index of the step that computes the result, or -1 for a constant.
        dimensions: shape of the result, as factors.
        constant: the value of all elements if the result is a constant, otherwise `None`.
        summed: axes of the step over which the terms are summed after the kernel has written them.
    """

    step: int
    dimensions: tuple[Dimension, ...]
    constant: bool | int | float | None = None
    summed: tuple[int, ...] = ()

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the result. `sizes` are the sizes of the step's axes."""
        return tuple(
            math.prod(f.count if isinstance(f, Cells) else sizes[f.number] for f in dim) for dim in self.dimensions
        )


@dataclass(frozen=True, slots=True)
class CellModule:
    """A graph on the elements of a step, `[*parts of the arguments] -> [*parts of some results]`.

    Attributes:
        module: the graph, which consists of pointwise ops and constants.
        inputs: for each placeholder, the part of an argument that it represents.
        outputs: for each entry of the output, the part of a result that it represents.
        sizes: sizes of the step's axes.
        where: for each axis of the step, the `(argument, dimension)` of a dimension that consists of this axis alone.
            `None` if no such dimension exists. The graph is then valid for only one size of the axis.
        rows: True if the `ROW_OPS` in the graph reduce the step's last axis.
    """

    module: fx.GraphModule
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    sizes: tuple[int, ...]
    where: tuple[tuple[int, int] | None, ...]
    rows: bool = False


@dataclass(frozen=True, slots=True)
class CutModule:
    """A function that cuts dimensions into pieces.

    One step computes all results with the same axes, so there is usually a single step.

    Attributes:
        steps: the graphs that compute the results.
        results: the origin and the shape of each result of the function.
        free: for each dimension of each argument, the index of its size among the free sizes, or `None` if the size is
            fixed. Dimensions with equal indices have equal sizes.
    """

    steps: tuple[CellModule, ...]
    results: tuple[CellResult, ...]
    free: tuple[tuple[int | None, ...], ...]
