"""Triton kernels on rows and columns. They reduce rows, sum over rows, and read operands along either dimension.

A program computes several rows. If rows are reduced, the program has all of their columns, padded to a power of two.
Otherwise, it has a block of columns. If results are summed over rows, the program computes `STEPS` blocks of rows, one
after the other, and writes the sums over these rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from flexsn_codegen.errors import UnsupportedOpError
from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._source import CoreSource, KernelSource, Like, framed
from flexsn_codegen.source._walk import terms_of
from flexsn_codegen.targets._base import RowLaunch, Summed, Target
from flexsn_codegen.targets.triton._literals import tl_name
from flexsn_codegen.targets.triton._writer import decode, jit_function
from flexsn_graph import ROW_MAX, ROW_MIN, ROW_SUM, Port, Role

_REDUCTIONS: dict[Any, str] = {ROW_SUM: "row_sum", ROW_MAX: "row_max", ROW_MIN: "row_min"}
# Number of columns of the longest row that can be reduced. It is limited, because all columns are in registers.
LONGEST_ROW = 1 << 16

# Number of elements of a program that reduces rows, of a program that sums over rows, and of a tile, which is used if
# operands are adjacent in different dimensions.
_BLOCK, _SUMMING_BLOCK, _TILE = 1024, 2048, 2048
# Number of columns of a program that sums over rows, and of a tile.
_SUMMED_COLUMNS, _TILE_COLUMNS = 512, 64
# Number of programs that sum over rows, and of programs that also reduce rows. There are enough programs for all
# multiprocessors, but few enough to write few sums. While rows are reduced, warps wait for each other. With
# more programs, other warps compute in this time.
_SUMMING_PROGRAMS, _REDUCING_PROGRAMS = 512, 1024

# With more operands than this number, a program that sums over rows has `_BLOCK` instead of `_SUMMING_BLOCK` elements.
_MOST_OPERANDS = 7

Direction = int | Like
Layout = tuple[Direction, Direction, Summed, int | None]
"""Layout of an operand: the terms of the offsets of its rows, the terms of the offsets of its columns, the dimension
over which it is summed, and the index of the operand with which it is interleaved. In memory, each element of that
operand is just before the corresponding element of this operand. Terms are `RUN` for a single stride, `PAIRS` for every
second element, `Like` for the terms of an earlier operand, and otherwise the number of terms. A list of layouts begins
with `(columns of a program, True if these are all columns)`."""
RUN, PAIRS = -1, -2


def row_launch(core: CoreSource, count: int, width: int, *, reduces: bool, sums: bool) -> RowLaunch:
    """Implements `Target.row_launch`."""
    if reduces and width > LONGEST_ROW:
        raise UnsupportedOpError(
            f"a kernel on a GPU reduces rows of at most {LONGEST_ROW} elements, but these rows have {width}.", "row_sum"
        )
    columns = 1 << max(0, width - 1).bit_length()
    if not reduces:
        columns = min(columns, _SUMMED_COLUMNS if sums else _TILE_COLUMNS)
    summing = _BLOCK if _needs_registers(core) else _SUMMING_BLOCK
    block = max(columns, summing if sums else _BLOCK if reduces else _TILE)
    warps = (4 if columns <= 2048 and not sums else 8 if columns <= 8192 else 16) if reduces else 4
    programs = _REDUCING_PROGRAMS if reduces else _SUMMING_PROGRAMS
    beside = -(-width // columns)
    tiles = -(-count // (block // columns))
    steps = -(-tiles // max(1, programs // beside)) if sums else 1
    return RowLaunch(columns, -(-tiles // max(1, steps)), beside, max(1, steps), block, warps)


def _needs_registers(core: CoreSource) -> bool:
    """True if a program should have fewer elements, so that its values fit into registers."""
    operands = len(core.arguments) + len(core.results)
    return operands > _MOST_OPERANDS or any(f"dev.{name}(" in core.source for name in ("sin", "cos", "tan"))


def walk_rows(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    split: int,
    launch: RowLaunch,
    sums: Sequence[Summed],
    after: Sequence[int | None],
) -> tuple[tuple[Any, ...], list[int]]:
    """Implements `Target.walk_rows`."""
    width = math.prod(sizes[split:])
    layouts: list[Any] = [(launch.columns, launch.beside == 1)]
    numbers = [width]
    if Summed.OVER_ROWS in sums:
        numbers.append(launch.steps)
    paired = {i for pair in enumerate(after) if None not in pair for i in pair}
    first: dict[tuple[bool, tuple[tuple[int, int, int], ...]], int] = {}
    for i, (operand_strides, summed) in enumerate(zip(strides, sums, strict=True)):
        if summed is Summed.OVER_ROWS:
            layouts.append((0, 0, summed, None))
            continue
        directions: list[Direction] = []
        for is_column, (part_sizes, part_strides) in enumerate(
            ((sizes[:split], operand_strides[:split]), (sizes[split:], operand_strides[split:]))
        ):
            terms = terms_of(part_sizes, part_strides)
            if is_column and i in paired and terms == [(1, math.prod(part_sizes), 2)]:
                directions.append(PAIRS)
                continue
            first_like = first.setdefault((bool(is_column), tuple(terms)), i)
            if first_like != i and terms:
                directions.append(Like(first_like))
            elif len(terms) == 1 and terms[0][:2] == (1, math.prod(part_sizes)):
                directions.append(RUN)
                numbers.append(terms[0][2])
            else:
                directions.append(len(terms))
                numbers += [number for term in terms for number in term]
        layouts.append((*directions, summed, after[i] if directions[1] == PAIRS else None))
    return tuple(layouts), numbers


def row_kernel(target: Target, name: str, core: CoreSource, layouts: Sequence[Any]) -> KernelSource:
    """Implements `Target.row_kernel`."""
    (columns, all_columns), *of_operands = layouts
    ports = (*core.arguments, *core.results)
    layout_of: dict[Port, Layout] = dict(zip(ports, of_operands, strict=True))
    summed = [port for port in core.results if layout_of[port][2] is Summed.OVER_ROWS]
    sizes = ["N", "width", *(["STEPS"] if summed else [])]
    placed = [port for port in ports if port not in summed]
    addresses, offsets, of_columns = _address_operands(ports, placed, core.results, layout_of, sizes)
    program = "tl.program_id(0).to(tl.int64)"
    lines = [f"ROWS: tl.constexpr = BLOCK // {columns} if BLOCK > {columns} else 1"]
    if all_columns:
        lines.append(f"program = {program}")
        lines.append(f"column = tl.arange(0, {columns})[None, :]")
    else:
        lines.append(f"beside = (width + {columns - 1}) // {columns}")
        lines.append(f"program = {program} // beside")
        lines.append(f"column = (tl.program_id(0) % beside) * {columns} + tl.arange(0, {columns})[None, :]")
    lines += ["inside = column < width", *of_columns]
    if PAIRS in {layout[1] for layout in layout_of.values()}:
        begin = "" if all_columns else f"(tl.program_id(0) % beside) * {2 * columns} + "
        lines.append(f"pair = {begin}tl.arange(0, {2 * columns})[None, :]")
        lines.append("pair_inside = pair < width * 2")
    for number in core.numbers:
        sizes += number.arguments
        lines.append(f"{number.name} = {decode(number)}")
    first = "program * STEPS + step" if summed else "program"
    body = [
        f"row = (({first}) * ROWS + tl.arange(0, ROWS))[:, None]",
        "exists = row < N",
        "mask = exists & inside",
        *offsets,
    ]
    firsts = {port: ports[layout[3]] for port, layout in layout_of.items() if layout[3] is not None}
    seconds = {first: port for port, first in firsts.items()}
    for port in core.arguments:
        address, mask = addresses[port]
        if port in firsts:
            continue
        load = f"{port.name} = dev.load({address}, {mask})"
        if port in seconds:
            load = f"{port.name}, {seconds[port].name} = dev.load_pair({address}, {mask})"
        # Operands that are the same for all rows are loaded once.
        (lines if mask == "inside" else body).append(load)
    body += _write_stages(core, addresses, layout_of, firsts, columns)
    if summed:
        for port in summed:
            kind = tl_name(register_dtype(_get_result_dtype(core, port)))
            lines.append(f"{port.name}_sum = tl.zeros([ROWS, {columns}], {kind})")
        lines += ["for step in range(0, STEPS):", *(f"    {line}" for line in body)]
        for port in summed:
            total = f"tl.sum({port.name}_sum, axis=0)[None, :]"
            lines.append(f"dev.store({port.name}_ptr + program * width + column, {total}, inside)")
    else:
        lines += body
    numbers = [argument for number in core.numbers for argument in number.arguments]
    # If operands are adjacent in different dimensions, the compiler needs the divisibility of `N` to vectorize loads.
    counts = ["N", "STEPS"] if summed else ["N"] if all_columns else []
    unspecialised = [*counts, *numbers]
    text_of_body = "\n".join("    " + line for line in lines)
    arguments = [*(f"{port.name}_ptr" for port in ports), *sizes]
    text = f"{(*arguments, *unspecialised)}\n{text_of_body}\n{core.name}"

    def kernel(full: str) -> str:
        return jit_function(full, arguments, unspecialised, text_of_body, "One program: BLOCK elements, in rows.")

    return framed(name, target, ports, sizes, [core], text, kernel)


def _address_operands(
    all_ports: Sequence[Port],
    ports: Sequence[Port],
    results: Collection[Port],
    layout_of: dict[Port, Layout],
    sizes: list[str],
) -> tuple[dict[Port, tuple[str, str]], list[str], list[str]]:
    """The address and mask of each operand, the lines that compute row offsets, and those that compute column offsets.

    Results are stored from all rows of a program, so the addresses of a result have an entry for each row, even if no
    offset depends on the row.
    """
    addresses: dict[Port, tuple[str, str]] = {}
    of_rows: list[str] = []
    of_columns: list[str] = []
    for port in ports:
        offsets = []
        for direction, terms in zip(("row", "column"), layout_of[port][:2], strict=True):
            if isinstance(terms, Like):
                offsets.append(f"{all_ports[terms.operand].name}_{direction}_off")
                continue
            summands = []
            if terms == PAIRS:
                offsets.append("pair")
                continue
            if terms == RUN:
                sizes.append(f"{port.name}_{direction}")
                summands.append(f"{direction}.to(tl.int64) * {port.name}_{direction}")
            for i in range(terms):
                inner, size, stride = (f"{port.name}_{direction}_{field}{i}" for field in ("inner", "size", "stride"))
                sizes += [inner, size, stride]
                summands.append(f"(({direction} // {inner}) % {size}).to(tl.int64) * {stride}")
            offsets.append(f"{port.name}_{direction}_off" if summands else "")
            if summands:
                lines = of_rows if direction == "row" else of_columns
                lines.append(f"{offsets[-1]} = {' + '.join(summands)}")
        by_row, by_column = offsets
        if not by_row and (port in results or not by_column):
            by_row = "row * 0"
        summands = [by_row] * bool(by_row) + [by_column] * bool(by_column)
        if by_column == "pair":
            by_row = by_row or "row * 0"
            addresses[port] = f"{port.name}_ptr + {by_row} + pair", "exists & pair_inside"
            continue
        mask = "exists" if not by_column else "mask" if by_row else "inside"
        addresses[port] = " + ".join([f"{port.name}_ptr", *summands]), mask
    return addresses, of_rows, of_columns


def _write_stages(
    core: CoreSource,
    addresses: dict[Port, tuple[str, str]],
    layout_of: dict[Port, Layout],
    firsts: dict[Port, Port],
    columns: int,
) -> list[str]:
    lines = []
    text_by_first: dict[Port, str] = {}
    reduced = 0
    for number_of_stage, stage in enumerate(core.stages):
        arguments = [port.name for port in stage.core.arguments] + [number.name for number in stage.core.numbers]
        results = [f"stage_{number_of_stage}_{i}" for i in range(len(stage.core.results))]
        lines.append(f"{', '.join(results)} = {stage.core.name}({', '.join(arguments)})")
        for value, (op, _) in zip(results, stage.reductions, strict=bool(stage.reductions)):
            row = Port(Role.LIFTED, reduced).name
            lines.append(f"{row} = dev.{_REDUCTIONS[op]}(tl.broadcast_to({value}, [ROWS, {columns}]), inside)")
            reduced += 1
        for number, port in zip(stage.values if stage.written else (), stage.written, strict=True):
            value = results[number]
            broadcast = f"tl.broadcast_to({value}, [ROWS, {columns if stage.whole else 1}])"
            summed = layout_of[port][2]
            if summed is Summed.OVER_ROWS:
                lines.append(f"{port.name}_sum += tl.where(mask, {broadcast}, 0)")
                continue
            address, mask = addresses[port]
            if summed is Summed.OVER_COLUMNS:
                broadcast = f"dev.row_sum({broadcast}, inside)"
            if port in firsts.values():
                text_by_first[port] = broadcast
                continue
            if port in firsts:
                address, mask = addresses[firsts[port]]
                lines.append(f"dev.store_pair({address}, {text_by_first.pop(firsts[port])}, {broadcast}, {mask})")
                continue
            lines.append(f"dev.store({address}, {broadcast}, {mask})")
    return lines


def _get_result_dtype(core: CoreSource, port: Port) -> Any:
    """Dtype of a result."""
    dtypes = [stage.dtypes[stage.written.index(port)] for stage in core.stages if port in stage.written]
    return dtypes[0]
