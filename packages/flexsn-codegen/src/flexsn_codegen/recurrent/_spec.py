"""The specification of a loop's kernel in any language: the parts of a step, memory, and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexsn_codegen.recurrent._gather import Gather
from flexsn_codegen.recurrent._loop import Loop, StageCall
from flexsn_codegen.source._source import CoreSource
from flexsn_graph import Port, Role, View


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The memory layout of a value with all of its steps.

    Attributes:
        row: the distance between two rows, if the columns of a row are adjacent and the rows of all steps are evenly
            spaced. `None` if the distances between steps, rows and columns are the arguments ``"<operand>_time"``,
            ``"<operand>_row"`` and ``"<operand>_column"``.
    """

    row: int | None


class Load(NamedTuple):
    """A view that a stage reads from memory, and the shape of the stage, to which the view broadcasts."""

    view: View
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """The specification of a loop's kernel.

    Attributes:
        cores: for each part of the loop, the source of the stage, or `None` if the part is not a stage.
        loads, stores: loads and stores in the order of `memory_of`, with their layouts.
        matrix_strides: strides of each matrix, by the index of the matrix.
        backwards: True if the loop runs from the last step to the first.
        from_zero: True if carried values that products read are zero before the first step.
        counts: the input with each row's number of remaining steps, which decreases by 1 in each step. After a row's
            last step, its outputs are zeros, its states stay the same and no gradient flows. The kernel receives the
            numbers before the first step, and loads each of them once. A program computes steps up to the largest
            number among its rows. `None` if there is no such input.
        parts: the number of 16-bit numbers into which products split a float32 number. Three of them represent the
            number exactly, two its first 16 significant bits, and one its first 8 significant bits.
    """

    loop: Loop
    cores: Sequence[CoreSource | None]
    loads: Sequence[tuple[Load, ValueLayout]]
    stores: Sequence[tuple[View, ValueLayout]]
    matrix_strides: Mapping[int, tuple[int, ...]]
    backwards: bool
    from_zero: bool
    counts: Port | None = None
    parts: int = 3


def memory_of(loop: Loop) -> tuple[tuple[Load, ...], tuple[View, ...]]:
    """The views that a loop loads at each step, and the views that it stores."""
    loads: list[Load] = []
    stores: list[View] = []
    for part in loop.parts:
        if isinstance(part, StageCall):
            used = {port.index for port in part.stage.graph.used if port.role is Role.INPUT}
            read_views = (read.view if isinstance(read, Gather) else read for read in part.reads)
            views = (v for i, v in enumerate(read_views) if isinstance(v, View) and i in used)
            results = (Load(v, part.stage.shape) for v in views if v.source.role is not Role.CAME_STATE)
            loads += [load for load in results if load not in loads]
            stores += [view for view in part.stored if view is not None]
        elif part.stored is not None:
            stores.append(part.stored)
    return tuple(loads), tuple(stores)


def two_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """The distances between rows and between columns of a value. All dimensions except for the last one form the rows.

    Raises:
        ValueError: the distances between rows are not all equal.
    """
    if not shape:
        return 0, 0
    rows: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if rows and rows[-1][1] == size * stride:
            rows[-1] = (rows[-1][0] * size, stride)
        else:
            rows.append((size, stride))
    if len(rows) > 1:
        raise ValueError(f"rows of strides {tuple(strides)}")
    return (rows[0][1] if rows else 0), (strides[-1] if shape[-1] != 1 else 1)
