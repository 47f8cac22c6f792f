"""Pointwise kernels in C++: nested loops over dimensions, with adjacent elements in the innermost loop.

Two dimensions are merged if the elements of both together are evenly spaced in the memory of every operand. In the
innermost dimension, an operand has adjacent elements, a single element, or elements with a stride. The loop is written
for each of these three cases, and compilers turn all of them into vector code. If the innermost dimension is short,
such as the three colours of a pixel, blocks of elements are first gathered row by row, so that the computation is still
vector code. If the adjacent elements of an operand are in another dimension, programs compute tiles of that dimension
and the innermost dimension, and transpose the operand's tile.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexsn_codegen.source._source import CoreSource, KernelSource, identifier
from flexsn_codegen.targets._base import Target
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_graph import Port

# Blocks are gathered if the innermost dimension has fewer elements than this number.
_SHORT = 16
# The number of elements that are gathered at a time. With this number, all operands stay in the L1 cache.
_GATHERED = 512

# Number of rows and of columns of a tile. A tile has several cache lines in both directions, and fits in the L1 cache.
_TILE = 64
# Tiles are only used if both of their dimensions have at least this size.
_LEAST_TILE = 16

Layout = str
"""Layout of an operand: ``"dense"``, or in the innermost dimension, ``"following"`` for adjacent elements, ``"one"``
for a single element, ``"apart"`` for elements with a stride, and ``"turned"`` for an operand whose tiles are
transposed. The first entry of a list of layouts describes the kernel: ``"DIMENSIONS"``, ``"DIMENSIONS short"`` or
``"DIMENSIONS turned"``."""


def walk(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Layout, ...], list[int]]:
    """Implements `Target.walk`.

    The integers are the sizes of all dimensions except the outermost dimension, and the strides of each operand that is
    not dense.
    """
    sizes, strides = _merge_dimensions(sizes, strides)
    # A symbolic size is not compared, because the comparison would become a guard of the compiled graph.
    short = len(sizes) > 1 and type(sizes[-1]) is int and sizes[-1] < _SHORT
    turned = None if short else _find_turned_dimension(sizes, strides)
    if turned is not None:
        for dimensions in (sizes, *strides):
            dimensions.insert(len(sizes) - 2, dimensions.pop(turned))
    layouts = [f"{len(sizes)}{' short' if short else '' if turned is None else ' turned'}"]
    numbers = list(sizes[1:])
    for operand_strides in strides:
        if all(stride == math.prod(sizes[d + 1 :]) for d, stride in enumerate(operand_strides)):
            layouts.append("dense")
            continue
        layout = "one" if operand_strides[-1] == 0 else "following" if operand_strides[-1] == 1 else "apart"
        layouts.append("turned" if layout == "apart" and turned is not None and operand_strides[-2] == 1 else layout)
        numbers += operand_strides
    return tuple(layouts), numbers


def _find_turned_dimension(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> int | None:
    """The first dimension along which some operand's elements are adjacent, but far apart in the innermost dimension.

    `None` if there is no such dimension, or if the dimensions are too short for tiles.
    """
    for d, size in enumerate(sizes[:-1]):
        if type(size) is not int or type(sizes[-1]) is not int or min(size, sizes[-1]) < _LEAST_TILE:
            continue
        for operand_strides in strides:
            stride, column_stride = operand_strides[d], operand_strides[-1]
            if type(stride) is int and stride == 1 and type(column_stride) is int and column_stride >= _LEAST_TILE:
                return d
    return None


def _merge_dimensions(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Merges dimensions that form a single dimension of every operand. Returns the new sizes and strides."""
    if not sizes:
        return [1], [[1] for _ in strides]
    joined_sizes, joined_strides = [sizes[-1]], [[before[-1]] for before in strides]
    for d in range(len(sizes) - 2, -1, -1):
        if all(
            before[d] == joined[0] * joined_sizes[0] for before, joined in zip(strides, joined_strides, strict=True)
        ):
            joined_sizes[0] = sizes[d] * joined_sizes[0]
            continue
        joined_sizes.insert(0, sizes[d])
        for before, joined in zip(strides, joined_strides, strict=True):
            joined.insert(0, before[d])
    return joined_sizes, joined_strides


@dataclass(frozen=True, slots=True)
class _Operand:
    port: Port
    layout: Layout
    dimensions: int

    @property
    def name(self) -> str:
        return self.port.name

    @property
    def strides(self) -> list[str]:
        """Names of the operand's strides, outermost first."""
        return [] if self.layout == "dense" else [f"{self.name}_stride{d}" for d in range(self.dimensions)]

    @property
    def has_rows(self) -> bool:
        """True if the kernel computes the offsets of the operand's rows."""
        return self.layout != "dense" and self.dimensions > 1

    @property
    def inner(self) -> str:
        """The source text `* stride` for the distance between elements of a row. Empty if the elements are adjacent."""
        return f" * {self.strides[-1]}" if self.layout in ("apart", "one") else ""


@dataclass(frozen=True, slots=True)
class _Shares:
    """The division of a kernel's elements among programs.

    Attributes:
        name: description of the elements of one program.
        programs: lines that compute the number of programs.
        position: lines that compute the position of a program's elements.
    """

    name: str
    programs: str
    position: str


_BLOCKS = _Shares(
    "BLOCK elements",
    "    const int64_t programs = (N + BLOCK - 1) / BLOCK;\n",
    """        const int64_t begin = program * BLOCK;
        const int64_t end = begin + BLOCK < N ? begin + BLOCK : N;
""",
)


def _divide_into_tiles(dimensions: int) -> _Shares:
    rows, columns = f"size{dimensions - 2}" if dimensions > 2 else "N / size1", f"size{dimensions - 1}"
    outer = "".join(
        f"        const int64_t index{d} = rest % size{d};\n        rest /= size{d};\n"
        for d in range(dimensions - 3, 0, -1)
    )
    return _Shares(
        f"a tile of {_TILE} rows and columns",
        f"""    const int64_t rows = {rows};
    const int64_t row_tiles = (rows + {_TILE - 1}) / {_TILE}, column_tiles = ({columns} + {_TILE - 1}) / {_TILE};
    const int64_t programs = N / (rows * {columns}) * row_tiles * column_tiles;
""",
        f"""        const int64_t column = program % column_tiles * {_TILE};
        const int64_t first_row = program / column_tiles % row_tiles * {_TILE};
        const int64_t outer = program / column_tiles / row_tiles;
        const int64_t tile_rows = rows - first_row < {_TILE} ? rows - first_row : {_TILE};
        const int64_t lanes = {columns} - column < {_TILE} ? {columns} - column : {_TILE};
"""
        + ("        int64_t rest = outer;\n" + outer if outer else ""),
    )


def pointwise(
    target: Target, name: str, core: CoreSource, layouts: Sequence[Layout], *, may_overlap: bool
) -> KernelSource:
    """Implements `Target.pointwise`."""
    first, *of_operands = layouts
    dimensions = int(first.split()[0])
    pairs = zip((*core.arguments, *core.results), of_operands, strict=True)
    operands = [_Operand(port, layout, dimensions) for port, layout in pairs]
    count = len(core.arguments)
    shares = _BLOCKS
    if first.endswith("turned"):
        shares = _divide_into_tiles(dimensions)
        body = _write_tiles(core, operands[:count], operands[count:], dimensions)
    elif first.endswith("short"):
        body = _write_gathered(core, operands[:count], operands[count:], dimensions)
    elif dimensions > 1:
        body = _write_rows(core, operands[:count], operands[count:], dimensions)
    else:
        body = _write_one_row(core, operands[:count], operands[count:])
    sizes = ["N", *(f"size{d}" for d in range(1, dimensions))]
    for operand in operands:
        sizes += operand.strides
    numbers = []
    for number in core.numbers:
        sizes += number.arguments
        words = ", ".join(number.arguments)
        numbers.append(f"    const auto {number.name} = dev::number<{cpp_name(number.dtype)}>({words});\n")
    types = ", ".join(f"typename {o.name}_t" for o in operands)
    restrict = "" if may_overlap else "__restrict "
    tensors = [f"{'const ' if i < count else ''}{o.name}_t* {restrict}{o.name}_ptr" for i, o in enumerate(operands)]
    signature = ",\n    ".join([*tensors, *(f"int64_t {size}" for size in sizes), "int64_t threads"])
    text = f"""{shares.programs}    const int64_t team = dev::team(threads, programs, N);
{"".join(numbers)}    #pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t program = 0; program < programs; ++program) {{
{shares.position}{body}    }}
"""
    digest = hashlib.sha256(f"{signature}\n{text}\n{core.name}".encode()).hexdigest()[:12]
    full_name = f"{identifier(name, reserved=target.reserved)}_{digest}"
    head = f"// One program: {shares.name}.\ntemplate <int64_t BLOCK, {types}>\nstatic void {full_name}("
    kernel = f"{head}\n    {signature}) {{\n{text}}}\n"
    source = f"{target.header}\n\n{_remove_rounding(core.source)}\n\n{kernel}"
    return KernelSource(full_name, source, tuple(o.port for o in operands), tuple(sizes), target)


_RESULTS = re.compile(r"return dev::make_tuple\((.*)\);")


def _remove_rounding(source: str) -> str:
    """The source of a function without the rounding of results that no other line reads, because stores round them."""
    match = _RESULTS.search(source)
    assert match is not None
    for name in set(match[1].split(", ")):
        if len(re.findall(rf"\b{name}\b", _remove_comments(source))) == 2:  # only in its definition and in the results
            source = re.sub(rf"(const auto {name} = )dev::round_b?float16\((\w+)\);", r"\1\2;", source)
    return source


def _remove_comments(source: str) -> str:
    return re.sub("//.*", "", source)


# -- loops over lanes ------------------------------------------------------------------------------------------


def _write_one_row(core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand]) -> str:
    lines = ["const int64_t lanes = end - begin;"]
    lines += [f"const auto {o.name}_at = {o.name}_ptr + begin{o.inner};" for o in (*inputs, *results)]
    return _indent([*lines, *_write_lanes(core, inputs, results)], 2)


def _write_rows(core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand], dimensions: int) -> str:
    operands = [*inputs, *results]
    inner = f"size{dimensions - 1}"
    lines = _write_first_row(operands, dimensions)
    lines += ["for (int64_t element = begin; element < end;) {"]
    body = [f"const int64_t lanes = {inner} - column < end - element ? {inner} - column : end - element;"]
    for o in operands:
        offset = "element" if o.layout == "dense" else f"{o.name}_row + column{o.inner}"
        body.append(f"const auto {o.name}_at = {o.name}_ptr + {offset};")
    body += _write_lanes(core, inputs, results)
    body += ["element += lanes;", "column = 0;", *_write_next_row(operands, dimensions)]
    return _indent([*lines, *("    " + line for line in body), "}"], 2)


def _write_gathered(core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand], dimensions: int) -> str:
    moved = [o for o in (*inputs, *results) if o.layout != "dense"]
    lines = [f"dev::Rows<{dimensions}> {o.name}_rows({{{_list_dimensions(o, dimensions)}}}, begin);" for o in moved]
    lines += [f"{o.name}_t {o.name}_of[{_GATHERED}];" for o in moved]
    lines += [f"for (int64_t element = begin; element < end; element += {_GATHERED}) {{"]
    body = [f"const int64_t lanes = end - element < {_GATHERED} ? end - element : {_GATHERED};"]
    body += [f"{o.name}_rows.gather({o.name}_ptr, {o.name}_of, lanes);" for o in inputs if o.layout != "dense"]
    for o in (*inputs, *results):
        pointer = f"{o.name}_ptr + element" if o.layout == "dense" else f"{o.name}_of"
        body.append(f"const auto {o.name}_at = {pointer};")
    dense = [[_Operand(o.port, "dense", 1) for o in operands] for operands in (inputs, results)]
    body += _write_lanes(core, *dense)
    body += [f"{o.name}_rows.scatter({o.name}_of, {o.name}_ptr, lanes);" for o in results if o.layout != "dense"]
    return _indent([*lines, *("    " + line for line in body), "}"], 2)


def _write_tiles(core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand], dimensions: int) -> str:
    operands = [*inputs, *results]
    lines = []
    for o in operands:
        start = f"(outer * rows + first_row) * size{dimensions - 1} + column"
        if o.layout != "dense":
            outer = ["rest" if dimensions > 3 else "outer", *(f"index{d}" for d in range(1, dimensions - 2))]
            indices = [*outer[: dimensions - 2], "first_row", "column"]
            start = " + ".join(f"{index} * {stride}" for index, stride in zip(indices, o.strides, strict=True))
        lines.append(f"const auto {o.name}_corner = {o.name}_ptr + {start};")
        if o.layout == "turned":
            lines.append(f"{o.name}_t {o.name}_tile[{_TILE * _TILE}];")
    for o in inputs:
        if o.layout == "turned":
            moved = f"{o.name}_corner, {o.strides[-1]}, {o.name}_tile, {_TILE}, tile_rows, lanes"
            lines.append(f"dev::transpose({moved});")
    lines.append("for (int64_t row = 0; row < tile_rows; ++row) {")
    for o in operands:
        start = f"{o.name}_corner + row * " + (f"size{dimensions - 1}" if o.layout == "dense" else o.strides[-2])
        if o.layout == "turned":
            start = f"{o.name}_tile + row * {_TILE}"
        lines.append(f"    const auto {o.name}_at = {start};")
    groups = [
        [replace(o, layout="following") if o.layout == "turned" else o for o in group] for group in (inputs, results)
    ]
    lines += ["    " + line for line in _write_lanes(core, *groups)]
    lines.append("}")
    for o in results:
        if o.layout == "turned":
            moved = f"{o.name}_tile, {_TILE}, {o.name}_corner, {o.strides[-1]}, lanes, tile_rows"
            lines.append(f"dev::transpose({moved});")
    return _indent(lines, 2)


def _list_dimensions(operand: _Operand, dimensions: int) -> str:
    sizes = ["1", *(f"size{d}" for d in range(1, dimensions))]
    return ", ".join(f"{{{size}, {stride}}}" for size, stride in zip(sizes, operand.strides, strict=True))


def _write_first_row(operands: Sequence[_Operand], dimensions: int) -> list[str]:
    """Lines that compute the position of a program's first element: its row, and its column in the row."""
    last = dimensions - 1
    lines = [f"int64_t column = begin % size{last};", f"int64_t rest = begin / size{last};"]
    for d in range(last - 1, 0, -1):
        lines += [f"int64_t index{d} = rest % size{d};", f"rest /= size{d};"]
    for o in operands:
        if o.has_rows:
            terms = [f"rest * {o.strides[0]}", *(f"index{d} * {o.strides[d]}" for d in range(1, last))]
            lines.append(f"int64_t {o.name}_row = {' + '.join(terms)};")
    return lines


def _write_next_row(operands: Sequence[_Operand], dimensions: int) -> list[str]:
    lines = []
    for d in range(dimensions - 2, -1, -1):
        pad = "    " * (dimensions - 2 - d)
        lines += [f"{pad}{o.name}_row += {o.strides[d]};" for o in operands if o.has_rows]
        if d > 0:
            lines.append(f"{pad}if (++index{d} == size{d}) {{")
            lines.append(f"{pad}    index{d} = 0;")
            lines += [f"{pad}    {o.name}_row -= size{d} * {o.strides[d]};" for o in operands if o.has_rows]
    lines += ["    " * level + "}" for level in range(dimensions - 3, -1, -1)]
    return lines


def _write_lanes(core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand]) -> list[str]:
    """Lines of the loop over the elements of a row, which starts at `<operand>_at`."""
    before = [f"const auto {o.name} = dev::load({o.name}_at[0]);" for o in inputs if o.layout == "one"]
    loop = [f"const auto {o.name} = dev::load({o.name}_at[{_lane_index(o)}]);" for o in inputs if o.layout != "one"]
    arguments = ", ".join([*(o.name for o in inputs), *(number.name for number in core.numbers)])
    loop.append(f"const auto results = {core.name}({arguments});")
    loop += [f"dev::store({o.name}_at[{_lane_index(o)}], dev::get<{i}>(results));" for i, o in enumerate(results)]
    if _allows_float_vectors(core, [*inputs, *results]):
        return [*before, *_write_float_vectors(core, inputs, results, arguments), *_write_remaining_lanes(loop)]
    return [
        *before,
        "DEV_LANES",
        "for (int64_t lane = 0; lane < lanes; ++lane) {",
        *("    " + line for line in loop),
        "}",
    ]


# Lines whose operations are valid for a float and for a vector of floats.
_OF_FLOATS = re.compile(
    r"\s*const auto \w+ = (?:dev::round_float16\(|float\([-+.\de]+\)|[a-z]\w*+(?![(:])|[-+*/()<>=?: ])+;(?:  //.*)?"
)


def _allows_float_vectors(core: CoreSource, operands: Sequence[_Operand]) -> bool:
    """True if a function rounds to float16, vectors of float can compute it, and no operand's elements have gaps."""
    if "dev::round_float16(" not in core.source or any(o.layout == "apart" for o in operands):
        return False
    statements = [line for line in core.source.splitlines() if line.lstrip().startswith("const ")]
    return all(_OF_FLOATS.fullmatch(line) for line in statements)


def _write_float_vectors(
    core: CoreSource, inputs: Sequence[_Operand], results: Sequence[_Operand], arguments: str
) -> Iterator[str]:
    """Lines of the loop over vectors of float, up to the last complete vector."""
    yield "int64_t lane = 0;"
    types = ", ".join(f"{o.name}_t" for o in (*inputs, *results))
    yield f"if constexpr (dev::in_floats<{types}>) {{"
    for o in inputs:
        if o.layout == "one":
            yield f"    const auto {o.name}_same = dev::same({o.name});"
    yield "    for (; lane + dev::float16_lanes <= lanes; lane += dev::float16_lanes) {"
    for o in inputs:
        value = f"{o.name}_same" if o.layout == "one" else f"dev::load_floats({o.name}_at + lane)"
        yield f"        const auto {o.name} = {value};"
    yield f"        const auto results = {core.name}({arguments});"
    for i, o in enumerate(results):
        yield f"        dev::store_floats({o.name}_at + lane, dev::get<{i}>(results));"
    yield "    }"
    yield "}"


def _write_remaining_lanes(loop: Sequence[str]) -> list[str]:
    return ["DEV_LANES", "for (; lane < lanes; ++lane) {", *("    " + line for line in loop), "}"]


def _lane_index(operand: _Operand) -> str:
    return "lane" + (f" * {operand.strides[-1]}" if operand.layout == "apart" else "")


def _indent(lines: Sequence[str], level: int) -> str:
    return "".join("    " * level + line + "\n" for line in lines)
