"""Values in the making: dimensions as products of axes and cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

_prims = torch.ops.prims


# Which axis: the number of the one that was made first, and of its factors.
Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenAxis:
    key: Key
    size: int


Factor: TypeAlias = "OpenAxis | int"
# An axis or cells, of a size.
Spec: TypeAlias = tuple[bool, int]
Dim: TypeAlias = tuple[Factor, ...]


class Refined(Exception):
    """An axis is a product."""

    def __init__(self, node: fx.Node, axis: OpenAxis, *factors: Spec) -> None:
        self.node = node
        self.key = axis.key
        self.factors = tuple(f for f in factors if f[1] > 1)


@dataclass(frozen=True, slots=True)
class Value:
    """Attributes:
    dims: of each dimension, its factors without those of one element.
    cells: of the sizes of all cells, in order; which of `nodes` each is.
    nodes: of the new graph.
    summed: the axes that it is summed over, afterwards.
    zero: it is 0 whatever the arguments are.
    wide: of a sum that was converted, as it was before.
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
    """The number that all of a value is; `None`: it is none."""
    (node, *others) = {value.nodes[i] for i in value.cells.flatten().tolist()}
    if others or node.op != "call_function" or node.target is not _prims.scalar_tensor.default:
        return None
    number: Any = node.args[0]
    return number  # type: ignore[no-any-return]


def with_chosen(dims: Sequence[Dim], flat: int, counts: Sequence[int]) -> Any:
    """The dimensions, with `(count, which one)` for cells."""
    chosen = []
    for count in reversed(counts):
        chosen.append(flat % count)
        flat //= count
    given = iter(reversed(chosen))
    return tuple(tuple(f if isinstance(f, OpenAxis) else (f, next(given)) for f in dim) for dim in dims)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()
