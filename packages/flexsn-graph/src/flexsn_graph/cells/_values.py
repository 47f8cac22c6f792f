"""Values of the graph that a pass creates. Their dimensions are products of axes and cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

_prims = torch.ops.prims


# Identifies an axis: the number of the original axis, then the index of each factor within the factor before it.
Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenAxis:
    key: Key
    size: int


Factor: TypeAlias = "OpenAxis | int"
# One factor: (True, size) for an axis, (False, size) for cells.
Spec: TypeAlias = tuple[bool, int]
Dim: TypeAlias = tuple[Factor, ...]


class Refined(Exception):
    """Raised when an op splits an axis into factors."""

    def __init__(self, node: fx.Node, axis: OpenAxis, *factors: Spec) -> None:
        self.node = node
        self.key = axis.key
        self.factors = tuple(f for f in factors if f[1] > 1)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the graph that a pass creates.

    Attributes:
        dims: the factors of each dimension, without factors of one element.
        cells: a table with one dimension per group of cells, in order. Its entries are indices of `nodes`.
        nodes: nodes of the new graph.
        summed: the axes over which the value remains to be summed.
        zero: True if the value is 0 for all arguments.
        wide: for a converted sum, the value before the conversion. Otherwise `None`.
    """

    dims: tuple[Dim, ...]
    cells: Tensor
    nodes: tuple[fx.Node, ...]
    summed: frozenset[OpenAxis] = frozenset()
    zero: bool = False
    wide: Value | None = None

    @property
    def factors(self) -> list[Factor]:
        return [f for dim in self.dims for f in dim]

    @property
    def axes(self) -> list[OpenAxis]:
        return [f for f in self.factors if isinstance(f, OpenAxis)]


def size_of(dim: Sequence[Factor]) -> int:
    return math.prod(f.size if isinstance(f, OpenAxis) else f for f in dim)


def counts_of(dims: Sequence[Dim]) -> list[int]:
    return [f for dim in dims for f in dim if not isinstance(f, OpenAxis)]


def num_values(args: Sequence[Any]) -> int:
    return sum(isinstance(a, Value | bool | int | float) for a in args)


def number_of(value: Value) -> bool | int | float | None:
    """The number that all cells of a value contain, or `None` if the cells are not one and the same constant."""
    (node, *others) = {value.nodes[i] for i in value.cells.flatten().tolist()}
    if others or node.op != "call_function" or node.target is not _prims.scalar_tensor.default:
        return None
    number: Any = node.args[0]
    return number  # type: ignore[no-any-return]


def with_chosen(dims: Sequence[Dim], flat: int, counts: Sequence[int]) -> Any:
    """The dimensions, with each count of cells replaced by `(count, chosen cell)`."""
    chosen = []
    for count in reversed(counts):
        chosen.append(flat % count)
        flat //= count
    cells = iter(reversed(chosen))
    return tuple(tuple(f if isinstance(f, OpenAxis) else (f, next(cells)) for f in dim) for dim in dims)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()
