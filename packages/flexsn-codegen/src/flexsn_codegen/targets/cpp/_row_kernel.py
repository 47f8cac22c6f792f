"""Kernels in C++ that reduce rows: for each row, one loop over its elements for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._source import CoreSource, KernelSource, RowStage, framed
from flexsn_codegen.targets._base import Target
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_graph import ROW_MAX, ROW_MIN, ROW_SUM, Port, Role

_REDUCTIONS: dict[Any, str] = {ROW_SUM: "row_sum", ROW_MAX: "row_max", ROW_MIN: "row_min"}

Layout = str
"""Places of an operand's elements in a row: ``"following"``, ``"one"`` or ``"apart"``. The first layout is the number
of dimensions."""


def walk_rows(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Layout, ...], list[int]]:
    """As `Target.walk_rows`: layouts; the width, sizes of all other dimensions but the outermost; strides."""
    layouts: list[Layout] = [str(len(sizes))]
    numbers = [sizes[-1], *sizes[1:-1]]
    for own in strides:
        layouts.append("one" if own[-1] == 0 else "following" if own[-1] == 1 else "apart")
        numbers += own
    return tuple(layouts), numbers


def row_kernel(
    target: Target, name: str, core: CoreSource, layouts: Sequence[Layout], *, may_overlap: bool
) -> KernelSource:
    """As `Target.row_kernel`."""
    dimensions, ports = int(layouts[0]), (*core.arguments, *core.results)
    layout_of = dict(zip(ports, layouts[1:], strict=True))
    sizes = ["N", "width", *(f"size{d}" for d in range(1, dimensions - 1))]
    for port in ports:
        sizes += [f"{port.name}_stride{d}" for d in range(dimensions)]
    numbers = []
    for number in core.numbers:
        sizes += number.arguments
        words = ", ".join(number.arguments)
        numbers.append(f"    const auto {number.name} = dev::number<{cpp_name(number.dtype)}>({words});")
    lines = _places(ports, dimensions)
    for port in core.arguments:
        if layout_of[port] == "one":
            lines.append(f"const auto {port.name} = dev::load({port.name}_at[0]);")
    reduced = 0
    for i, stage in enumerate(core.stages):
        if stage.reductions:
            lines += _reduction(i, stage, reduced, layout_of, dimensions)
            reduced += len(stage.reductions)
        elif stage.whole:
            lines += ["DEV_LANES", "for (int64_t lane = 0; lane < width; ++lane) {"]
            lines += [f"    {line}" for line in _called(i, stage, layout_of, dimensions)]
            for value, port in enumerate(stage.written):
                place = _place(port, layout_of[port], dimensions)
                lines.append(f"    dev::store_rounded({place}, std::get<{value}>(results_{i}));")
            lines.append("}")
        else:
            lines += _called(i, stage, layout_of, dimensions)
            for value, port in enumerate(stage.written):
                lines.append(f"dev::store_rounded({port.name}_at[0], std::get<{value}>(results_{i}));")
    types = ", ".join(f"typename {port.name}_t" for port in ports)
    restrict = "" if may_overlap else "__restrict "
    count = len(core.arguments)
    tensors = [
        f"{'const ' if i < count else ''}{port.name}_t* {restrict}{port.name}_ptr" for i, port in enumerate(ports)
    ]
    signature = ",\n    ".join([*tensors, *(f"int64_t {size}" for size in sizes), "int64_t threads"])
    body = "\n".join("        " + line for line in lines)
    declared = "".join(line + "\n" for line in numbers)
    text = f"""    const int64_t team = dev::team(threads, N, N * width);
{declared}    #pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t row = 0; row < N; ++row) {{
{body}
    }}
"""

    def kernel(full: str) -> str:
        head = f"// All rows.\ntemplate <int64_t BLOCK, {types}>\nstatic void {full}("
        return f"{head}\n    {signature}) {{\n{text}}}\n"

    found = framed(name, target, ports, sizes, [core], f"{signature}\n{text}\n{core.name}", kernel)
    header = '#include "device/rows.h"\n'
    return KernelSource(found.name, header + found.source, found.params, found.sizes, target)


def _places(ports: Sequence[Port], dimensions: int) -> list[str]:
    """Where a row of each operand begins."""
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


def _place(port: Port, layout: Layout, dimensions: int) -> str:
    step = f" * {port.name}_stride{dimensions - 1}" if layout == "apart" else ""
    return f"{port.name}_at[lane{step}]"


def _called(i: int, stage: RowStage, layout_of: dict[Port, Layout], dimensions: int) -> list[str]:
    """The results of a stage at `lane`."""
    inputs = [port for port in stage.core.arguments if port.role is Role.INPUT and layout_of[port] != "one"]
    lines = [f"const auto {p.name} = dev::load({_place(p, layout_of[p], dimensions)});" for p in inputs]
    given = [*(port.name for port in stage.core.arguments), *(number.name for number in stage.core.numbers)]
    return [*lines, f"const auto results_{i} = {stage.core.name}({', '.join(given)});"]


def _reduction(i: int, stage: RowStage, first: int, layout_of: dict[Port, Layout], dimensions: int) -> list[str]:
    names = [Port(Role.LIFTED, first + n).name for n in range(len(stage.reductions))]
    lines = []
    for name, (op, dtype) in zip(names, stage.reductions, strict=True):
        kind = cpp_name(register_dtype(dtype))
        lines.append(f"dev::RowParts<dev::{_REDUCTIONS[op]}, {kind}> {name}_parts;")
    lines += [
        f"const auto stage_{i} = [&](int64_t lane, int64_t part) __attribute__((always_inline)) {{",
        *(f"    {line}" for line in _called(i, stage, layout_of, dimensions)),
        *(f"    {name}_parts.add(part, std::get<{n}>(results_{i}));" for n, name in enumerate(names)),
        "};",
        f"int64_t done_{i} = 0;",
        f"for (; done_{i} + dev::row_lanes <= width; done_{i} += dev::row_lanes) {{",
        "    DEV_LANES",
        f"    for (int64_t part = 0; part < dev::row_lanes; ++part) stage_{i}(done_{i} + part, part);",
        "}",
        "DEV_LANES",
        f"for (int64_t part = 0; part < width - done_{i}; ++part) stage_{i}(done_{i} + part, part);",
        *(f"const auto {name} = {name}_parts.all();" for name in names),
    ]
    return lines
