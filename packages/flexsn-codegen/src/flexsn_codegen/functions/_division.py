"""Divides a step into rows and columns, for results that are sums and for operands with different memory orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexsn_codegen.targets import Summed, Target

# With fewer columns, most elements of a program's block would be unused.
_LEAST_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Division:
    """Rows and columns of a step.

    Attributes:
        split: number of leading walked dimensions that belong to the rows.
        sums: for each result, the sum that the kernel computes. Remaining sums are computed after the kernel.
    """

    split: int
    sums: tuple[Summed, ...]


def divide(
    target: Target, sizes: Sequence[int], strides: Sequence[Sequence[int]], summed: Sequence[frozenset[int]]
) -> Division | None:
    """The division of a step, or `None` if its elements are to be walked one after the other.

    Args:
        sizes: sizes of the walked dimensions, outermost first. All are larger than one.
        strides: for each operand that the kernel reads, its strides over the walked dimensions.
        summed: for each result, the walked dimensions over which the result is summed, as positions in `sizes`.
    """
    if not target.reduces_rows or any(type(size) is not int for size in sizes) or 0 in sizes:
        return None
    best: Division | None = None
    most_handled = 0
    for split in range(1, len(sizes)):
        width = math.prod(sizes[split:])
        if width < _LEAST_COLUMNS or (target.columns_in_runs and not _is_run(sizes[split:], strides, split)):
            continue
        sums = tuple(_choose_sum(axes, split, len(sizes), width, target.most_columns) for axes in summed)
        handled = sum(kind is not Summed.NOT for kind in sums)
        if handled > most_handled:
            best, most_handled = Division(split, sums), handled
    if best is None and not any(summed) and not target.columns_in_runs and _has_turned_operand(sizes, strides):
        return Division(len(sizes) - 1, (Summed.NOT,) * len(summed))
    return best


def _choose_sum(summed: frozenset[int], split: int, dimensions: int, width: int, most: int) -> Summed:
    if summed == frozenset(range(split)):
        return Summed.OVER_ROWS
    if summed >= frozenset(range(split, dimensions)) and width <= most:
        return Summed.OVER_COLUMNS
    return Summed.NOT


def _is_run(sizes: Sequence[int], strides: Sequence[Sequence[int]], split: int) -> bool:
    """True if the columns are evenly spaced in each operand."""
    return all(
        operand_strides[split + d] == operand_strides[split + d + 1] * sizes[d + 1]
        for operand_strides in strides
        for d in range(len(sizes) - 1)
    )


def _has_turned_operand(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """True if an operand's elements are adjacent in memory, but not along the innermost dimension of the walk."""
    if not sizes or sizes[-1] < _LEAST_COLUMNS:
        return False
    return any(
        operand_strides[-1] not in (0, 1)
        and any(
            stride == 1 and size >= _LEAST_COLUMNS
            for stride, size in zip(operand_strides[:-1], sizes[:-1], strict=True)
        )
        for operand_strides in strides
    )
