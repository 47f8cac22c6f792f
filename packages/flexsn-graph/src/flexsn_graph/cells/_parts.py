"""Pieces of arguments and results of a function that cuts, and the steps on their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Axis:
    """A factor of a dimension that the kernel counts; in a finished graph, `number` is that among the step's axes."""

    number: int


@dataclass(frozen=True, slots=True)
class Cells:
    """A factor of a dimension that is written out; `chosen`: which one this is."""

    count: int
    chosen: int


Dimension: TypeAlias = tuple[Axis | Cells, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a tensor that a kernel reads or writes: for each dimension its factors, outermost first."""

    tensor: int
    dimensions: tuple[Dimension, ...]

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements of `tensor`, at their places in a step of `shape`."""
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
    """A result of a function that cuts.

    Attributes:
        step: which step computes it; -1: none, it is a constant.
        dimensions: its shape, as factors.
        constant: the number that all of it is, if it is.
        summed: the axes of the step that it is summed over, after the kernel has written the terms.
    """

    step: int
    dimensions: tuple[Dimension, ...]
    constant: bool | int | float | None = None
    summed: tuple[int, ...] = ()

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Its shape in a step of `sizes`."""
        return tuple(
            math.prod(f.count if isinstance(f, Cells) else sizes[f.number] for f in dim) for dim in self.dimensions
        )


@dataclass(frozen=True, slots=True)
class CellModule:
    """A graph on elements of a step alone, `[*parts of the arguments] -> [*parts of some results]`.

    Attributes:
        module: of pointwise ops and constants.
        inputs: the part of an argument that each placeholder is.
        outputs: the part of a result that each entry of its output is.
        sizes: of the step's axes.
        where: of each axis of the step, `(argument, dimension)` that is it and nothing else; `None`: there is none, so
            that its size belongs to the graph.
        rows: True if the step's last axis is one that the graph reduces by `ROW_OPS`.
    """

    module: fx.GraphModule
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    sizes: tuple[int, ...]
    where: tuple[tuple[int, int] | None, ...]
    rows: bool = False


@dataclass(frozen=True, slots=True)
class CutModule:
    """A function that cuts: one step for each set of results with the same elements, mostly one step.

    Attributes:
        steps: what computes them.
        results: what becomes of the function's results.
        free: of each argument's dimensions, which size it has, counted over all of them, if it may have another one;
            `None`: it may not.
    """

    steps: tuple[CellModule, ...]
    results: tuple[CellResult, ...]
    free: tuple[tuple[int | None, ...], ...]
