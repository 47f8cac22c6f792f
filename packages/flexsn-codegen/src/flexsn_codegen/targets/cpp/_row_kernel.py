"""C++ kernels on rows and columns. For each row, each stage is one loop over the row's elements.

A stage whose results have one element for each row is a single call instead of a loop. If results are summed over rows,
a program computes `STEPS` rows and writes the sums over these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._source import CoreSource, KernelSource, RowStage, framed
from flexsn_codegen.targets._base import RowLaunch, Summed, Target
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_graph import ROW_MAX, ROW_MIN, ROW_SUM, Port, Role

_REDUCTIONS: dict[Any, str] = {ROW_SUM: "row_sum", ROW_MAX: "row_max", ROW_MIN: "row_min"}

# The smallest number of rows of a program that sums over rows, and the largest number of programs. With these numbers,
# programs write few sums in comparison to the elements that they read.
_LEAST_ROWS, _MOST_PROGRAMS = 64, 64

Layout = str
"""Positions of an operand's elements in a row: ``"following"`` for adjacent elements, ``"one"`` for a single element,
and ``"apart"`` for elements with a stride. ``"sum"`` is a result that is summed over rows, and ``"sum of columns"`` a
result that is summed over columns. The first entry of a list of layouts is the number of dimensions."""


def row_launch(count: int, width: int, *, sums: bool) -> RowLaunch:
    """Implements `Target.row_launch`."""
    if not sums:
        return RowLaunch(max(1, width), count)  # at least one column, because an empty row has a sum, too
    steps = max(_LEAST_ROWS, -(-count // _MOST_PROGRAMS))
    return RowLaunch(max(1, width), -(-count // steps), steps=steps)


def walk_rows(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], launch: RowLaunch, sums: Sequence[Summed]
) -> tuple[tuple[Layout, ...], list[int]]:
    """Implements `Target.walk_rows`.

    The integers are the width, the sizes of all dimensions between the outermost and the innermost dimension, `STEPS`
    if results are summed over rows, and the strides of all operands that are not summed over rows.
    """
    layouts: list[Layout] = [str(len(sizes))]
    numbers = [sizes[-1], *sizes[1:-1]]
    if Summed.OVER_ROWS in sums:
        numbers.append(launch.steps)
    for operand_strides, summed in zip(strides, sums, strict=True):
        if summed is Summed.OVER_ROWS:
            layouts.append("sum")
            continue
        layout = "one" if operand_strides[-1] == 0 else "following" if operand_strides[-1] == 1 else "apart"
        layouts.append("sum of columns" if summed is Summed.OVER_COLUMNS else layout)
        numbers += operand_strides
    return tuple(layouts), numbers


def row_kernel(
    target: Target, name: str, core: CoreSource, layouts: Sequence[Layout], *, may_overlap: bool
) -> KernelSource:
    """Implements `Target.row_kernel`."""
    dimensions, ports = int(layouts[0]), (*core.arguments, *core.results)
    layout_of = dict(zip(ports, layouts[1:], strict=True))
    summed = [port for port in core.results if layout_of[port] == "sum"]
    sizes = ["N", "width", *(f"size{d}" for d in range(1, dimensions - 1)), *(["STEPS"] if summed else [])]
    for port in ports:
        if port not in summed:
            sizes += [f"{port.name}_stride{d}" for d in range(dimensions)]
    numbers = []
    for number in core.numbers:
        sizes += number.arguments
        words = ", ".join(number.arguments)
        numbers.append(f"    const auto {number.name} = dev::number<{cpp_name(number.dtype)}>({words});")
    lines = _write_row_starts([port for port in ports if port not in summed], dimensions)
    for port in core.arguments:
        if layout_of[port] == "one":
            lines.append(f"const auto {port.name} = dev::load({port.name}_at[0]);")
    reduced = 0
    for i, stage in enumerate(core.stages):
        if stage.reductions:
            lines += _write_reduction(i, stage, reduced, layout_of, dimensions)
            reduced += len(stage.reductions)
        elif stage.whole:
            lines += _write_elements(i, stage, layout_of, dimensions)
        else:
            lines += _write_call(i, stage, layout_of, dimensions)
            for value, port in zip(stage.values, stage.written, strict=True):
                lines.append(f"dev::store_rounded({port.name}_at[0], dev::get<{value}>(results_{i}));")
    types = ", ".join(f"typename {port.name}_t" for port in ports)
    restrict = "" if may_overlap else "__restrict "
    count = len(core.arguments)
    tensors = [
        f"{'const ' if i < count else ''}{port.name}_t* {restrict}{port.name}_ptr" for i, port in enumerate(ports)
    ]
    signature = ",\n    ".join([*tensors, *(f"int64_t {size}" for size in sizes), "int64_t threads"])
    declared = "".join(line + "\n" for line in numbers)
    saved = [pair for stage in core.stages for pair in stage.kept_results]
    text = declared + _write_rows(lines, summed, saved)

    def kernel(full: str) -> str:
        head = f"// All rows.\ntemplate <int64_t BLOCK, {types}>\nstatic void {full}("
        return f"{head}\n    {signature}) {{\n{text}}}\n"

    source = framed(name, target, ports, sizes, [core], f"{signature}\n{text}\n{core.name}", kernel)
    header = '#include "device/rows.h"\n'
    return KernelSource(source.name, header + source.source, source.params, source.sizes, target)


def _write_rows(lines: Sequence[str], summed: Sequence[Port], saved: Sequence[tuple[Port, Any]]) -> str:
    """The loop over all rows, or over programs and their rows. Each thread allocates a row for each value `saved`."""
    rows = "".join(
        f"    dev::Row<{cpp_name(register_dtype(dtype))}> {port.name}_row(width);\n" for port, dtype in saved
    )
    if not summed:
        body = "\n".join("        " + line for line in lines)
        return f"""    const int64_t team = dev::team(threads, N, N * width);
    #pragma omp parallel num_threads(team) if (team > 1)
    {{
{rows}    #pragma omp for schedule(static)
    for (int64_t row = 0; row < N; ++row) {{
{body}
    }}
    }}
"""
    body = "\n".join("            " + line for line in lines)
    cleared = "\n".join(
        f"""        const auto {port.name}_sum = {port.name}_ptr + program * width;
        for (int64_t lane = 0; lane < width; ++lane) {port.name}_sum[lane] = 0;"""
        for port in summed
    )
    return f"""    const int64_t programs = (N + STEPS - 1) / STEPS;
    const int64_t team = dev::team(threads, programs, N * width);
    #pragma omp parallel num_threads(team) if (team > 1)
    {{
{rows}    #pragma omp for schedule(static)
    for (int64_t program = 0; program < programs; ++program) {{
{cleared}
        const int64_t end = (program + 1) * STEPS < N ? (program + 1) * STEPS : N;
        for (int64_t row = program * STEPS; row < end; ++row) {{
{body}
        }}
    }}
    }}
"""


def _write_row_starts(ports: Sequence[Port], dimensions: int) -> list[str]:
    """Lines that compute where a row of each operand starts in memory."""
    lines = []
    last = dimensions - 1
    if last > 1:
        lines.append("int64_t rest = row;")
        for d in range(last - 1, 0, -1):
            lines += [f"const int64_t index{d} = rest % size{d};", f"rest /= size{d};"]
    for port in ports:
        first = ["rest" if last > 1 else "row"] if last else []
        indices = [*first, *(f"index{d}" for d in range(1, last))]
        terms = [f"{index} * {port.name}_stride{d}" for d, index in enumerate(indices)]
        lines.append(f"const auto {port.name}_at = {' + '.join([f'{port.name}_ptr', *terms])};")
    return lines


def _element_at_lane(port: Port, layout: Layout, dimensions: int) -> str:
    step = f" * {port.name}_stride{dimensions - 1}" if layout == "apart" else ""
    return f"{port.name}_at[lane{step}]"


def _write_call(i: int, stage: RowStage, layout_of: dict[Port, Layout], dimensions: int) -> list[str]:
    """Lines that compute the results of a stage at `lane`."""
    inputs = [port for port in stage.core.arguments if port.role is Role.INPUT and layout_of[port] != "one"]
    lines = [f"const auto {p.name} = dev::load({_element_at_lane(p, layout_of[p], dimensions)});" for p in inputs]
    saved = [port for port in stage.core.arguments if port.role is Role.SAVED]
    lines += [f"const auto {port.name} = {port.name}_row[lane];" for port in saved]
    arguments = [*(port.name for port in stage.core.arguments), *(number.name for number in stage.core.numbers)]
    return [*lines, f"const auto results_{i} = {stage.core.name}({', '.join(arguments)});"]


def _write_elements(i: int, stage: RowStage, layout_of: dict[Port, Layout], dimensions: int) -> list[str]:
    """Lines of a stage whose results are written or summed at each element of a row."""
    written = []
    parts: dict[Port, str] = {}
    for value, port, dtype in zip(stage.values, stage.written, stage.dtypes, strict=True):
        result = f"dev::get<{value}>(results_{i})"
        if layout_of[port] == "sum":
            written.append(f"{port.name}_sum[lane] += {result};")
        elif layout_of[port] == "sum of columns":
            parts[port] = cpp_name(register_dtype(dtype))
            written.append(f"{port.name}_parts.add(part, {result});")
        else:
            written.append(f"dev::store_rounded({_element_at_lane(port, layout_of[port], dimensions)}, {result});")
    body = [*_write_call(i, stage, layout_of, dimensions), *written]
    if not parts:
        return ["DEV_LANES", "for (int64_t lane = 0; lane < width; ++lane) {", *(f"    {line}" for line in body), "}"]
    return [
        *(f"dev::RowParts<dev::row_sum, {kind}> {port.name}_parts;" for port, kind in parts.items()),
        *_write_partial_loop(i, body),
        *(f"dev::store_rounded({port.name}_at[0], {port.name}_parts.all());" for port in parts),
    ]


def _write_partial_loop(i: int, body: Sequence[str]) -> list[str]:
    """Lines of a loop over a row. In its body, `part` is the index of the partial result to which `lane` belongs."""
    return [
        f"const auto stage_{i} = [&](int64_t lane, int64_t part) __attribute__((always_inline)) {{",
        *(f"    {line}" for line in body),
        "};",
        f"int64_t done_{i} = 0;",
        f"for (; done_{i} + dev::row_lanes <= width; done_{i} += dev::row_lanes) {{",
        "    DEV_LANES",
        f"    for (int64_t part = 0; part < dev::row_lanes; ++part) stage_{i}(done_{i} + part, part);",
        "}",
        "DEV_LANES",
        f"for (int64_t part = 0; part < width - done_{i}; ++part) stage_{i}(done_{i} + part, part);",
    ]


def _write_reduction(i: int, stage: RowStage, first: int, layout_of: dict[Port, Layout], dimensions: int) -> list[str]:
    names = [Port(Role.LIFTED, first + n).name for n in range(len(stage.reductions))]
    lines = []
    for name, (op, dtype) in zip(names, stage.reductions, strict=True):
        kind = cpp_name(register_dtype(dtype))
        lines.append(f"dev::RowParts<dev::{_REDUCTIONS[op]}, {kind}> {name}_parts;")
    body = [
        *_write_call(i, stage, layout_of, dimensions),
        *(f"{name}_parts.add(part, dev::get<{n}>(results_{i}));" for n, name in enumerate(names)),
        *(
            f"{p.name}_row[lane] = dev::get<{n}>(results_{i});"
            for n, (p, _) in enumerate(stage.kept_results, len(names))
        ),
    ]
    return [*lines, *_write_partial_loop(i, body), *(f"const auto {name} = {name}_parts.all();" for name in names)]
