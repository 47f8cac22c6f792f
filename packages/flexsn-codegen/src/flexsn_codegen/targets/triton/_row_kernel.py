"""Kernels in Triton that reduce rows: a program has some whole rows, padded to a power of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flexsn_codegen.errors import UnsupportedOpError
from flexsn_codegen.source._source import DENSE, CoreSource, KernelSource, framed
from flexsn_codegen.source._walk import by_terms
from flexsn_codegen.targets._base import Target
from flexsn_codegen.targets.triton._writer import decoded, jit_function
from flexsn_graph import ROW_MAX, ROW_MIN, ROW_SUM, Port, Role

_REDUCTIONS: dict[Any, str] = {ROW_SUM: "row_sum", ROW_MAX: "row_max", ROW_MIN: "row_min"}
# All of a row is in registers.
_LONGEST = 1 << 16


def padded_row(width: int) -> tuple[int, int]:
    """As `Target.padded_row`."""
    if width > _LONGEST:
        raise UnsupportedOpError(
            f"a kernel on a GPU reduces rows of at most {_LONGEST} elements, and these have {width}.", "row_sum"
        )
    padded = 1 << max(0, width - 1).bit_length()
    return padded, 4 if padded <= 2048 else 8 if padded <= 8192 else 16


def walk_rows(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
    """As `Target.walk_rows`. The first layout is the padded width; each other one the number of terms of a row's
    offset, and whether the operand has columns."""
    padded, _ = padded_row(sizes[-1])
    layouts: list[Any] = [padded]
    numbers = [sizes[-1]]
    for own in strides:
        # A row of an operand is found as an element of a step without columns is.
        (terms,), integers = by_terms(sizes[:-1], [own[:-1]])
        if terms == DENSE:
            terms, integers = 1, [1, math.prod(sizes[:-1]), 1]
        layouts.append((terms, own[-1] != 0))
        numbers += [*integers, *([own[-1]] if own[-1] != 0 else [])]
    return tuple(layouts), numbers


def row_kernel(target: Target, name: str, core: CoreSource, layouts: Sequence[Any]) -> KernelSource:
    """As `Target.row_kernel`."""
    padded, *of_operands = layouts
    ports = (*core.arguments, *core.results)
    sizes, lines = (
        ["N", "width"],
        [
            f"ROWS: tl.constexpr = BLOCK // {padded} if BLOCK > {padded} else 1",
            f"column = tl.arange(0, {padded})[None, :]",
            "row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]",
            "inside = column < width",
            "exists = row < N",
            "mask = exists & inside",
        ],
    )
    places: dict[Port, tuple[str, str]] = {}
    for port, (terms, has_columns) in zip(ports, of_operands, strict=True):
        summands = []
        for i in range(terms):
            inner, size, stride = (f"{port.name}_{what}{i}" for what in ("inner", "size", "stride"))
            sizes += [inner, size, stride]
            summands.append(f"((row // {inner}) % {size}) * {stride}")
        mask = "exists"
        if has_columns:
            sizes.append(f"{port.name}_column")
            summands.append(f"column.to(tl.int64) * {port.name}_column")
            mask = "mask"
        offset = " + ".join(summands) or "row * 0"
        lines.append(f"{port.name}_off = {offset}")
        places[port] = f"{port.name}_ptr + {port.name}_off", mask
    for number in core.numbers:
        sizes += number.arguments
        lines.append(f"{number.name} = {decoded(number)}")
    for port in core.arguments:
        place, mask = places[port]
        lines.append(f"{port.name} = dev.load({place}, {mask})")
    reduced = 0
    for number_of_stage, stage in enumerate(core.stages):
        given = [port.name for port in stage.core.arguments] + [number.name for number in stage.core.numbers]
        results = [f"stage_{number_of_stage}_{i}" for i in range(len(stage.core.results))]
        lines.append(f"{', '.join(results)} = {stage.core.name}({', '.join(given)})")
        for value, (op, _) in zip(results, stage.reductions, strict=bool(stage.reductions)):
            row = Port(Role.LIFTED, reduced).name
            lines.append(f"{row} = dev.{_REDUCTIONS[op]}(tl.broadcast_to({value}, [ROWS, {padded}]), inside)")
            reduced += 1
        for value, port in zip(results, stage.written, strict=bool(stage.written)):
            place, mask = places[port]
            columns = padded if stage.whole else 1
            lines.append(f"dev.store({place}, tl.broadcast_to({value}, [ROWS, {columns}]), {mask})")
    unspecialised = ["N", *(argument for number in core.numbers for argument in number.arguments)]
    body = "\n".join("    " + line for line in lines)
    arguments = [*(f"{port.name}_ptr" for port in ports), *sizes]
    text = f"{(*arguments, *unspecialised)}\n{body}\n{core.name}"

    def kernel(full: str) -> str:
        return jit_function(full, arguments, unspecialised, body, "One program: BLOCK elements, in whole rows.")

    return framed(name, target, ports, sizes, [core], text, kernel)
