"""Kernels in Triton that compute all steps of a recurrent loop in one launch.

A program computes `BLOCK` rows and some columns of every value, for all steps. It loads its columns of the matrices
once, and its columns of the states stay in registers. Programs that share rows exchange the operands of products: each
program publishes its columns in one of two slots, arrives at a counter, and waits for all programs before it loads all
columns. Two slots are enough, because a program that writes to a slot again has already waited for the programs that
read the slot.

If many values pass from step to step, such as gradients of delayed values, most of them pass through memory. A program
reads and writes only its own elements of this memory, so no program waits for another program. Even and odd steps use
separate halves of the memory.

While a program waits, the loads of the next step and the stores of this step are in flight, and the program computes
those pieces of stages that only depend on values of earlier steps.

A reduction of a row needs all columns of the row. Therefore, programs that share rows also exchange the operand of the
reduction, and each program reduces all columns, in the same order. Products of one operand are computed together, chunk
by chunk, because the chunks of an operand in three parts do not fit into registers at the same time.

A program that has all columns of its rows exchanges nothing. It multiplies and reduces the values in its registers.

If rows end, a program computes the steps of its longest row. In the forward, it computes one more step, and stores the
results of that step for all later steps. In the backward, it stores the gradients of final states, or zeros, as the
results of later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flexsn_codegen.recurrent._gather import Gather
from flexsn_codegen.recurrent._loop import Columns, Exchange, Multiply, Reduce, StageCall
from flexsn_codegen.recurrent._spec import Load, LoopSpec, ValueLayout, two_strides
from flexsn_codegen.source._dtypes import HALF_DTYPES, register_dtype
from flexsn_codegen.source._source import KernelSource, framed
from flexsn_codegen.targets.triton import TRITON
from flexsn_codegen.targets.triton._literals import tl_name
from flexsn_codegen.targets.triton._writer import jit_function
from flexsn_graph import Port, Role, View

_prims = torch.ops.prims
_REDUCTIONS: dict[Any, str] = {
    _prims.sum.default: "row_sum",
    _prims.amax.default: "row_max",
    _prims.amin.default: "row_min",
    _prims.var.default: "row_var",
}
_LEAST = 16  # the smallest number of columns of a product, and of terms of a sum, that the GPU's matrix units accept


@dataclass(frozen=True, slots=True)
class Tiles:
    """The division of a step among programs.

    Attributes:
        rows: number of rows of one program, a power of two. The smallest number is 16, or 8 if programs exchange
            nothing, or 1 if the loop has no products.
        count: number of programs that have the same rows and share the columns.
        chunk: number of terms of a sum that are multiplied together.
        num_warps: number of warps of one program.
        ahead: number of chunks of an operand that are loaded before the first chunk is multiplied, if the operand is
            not in parts.
        exchanged: True if programs exchange the operands of products. If False, one program has all columns, `chunk`
            and `ahead` are unused, and programs need not run at the same time.
        least: the smallest number of columns of a value that one program has, with padding. Triton divides all
            products of a loop among the warps in the same way. If a product does not have more columns than rows,
            Triton only divides rows, and each warp then computes all columns of the wider products, too.
    """

    rows: int
    count: int
    chunk: int
    num_warps: int
    ahead: int
    exchanged: bool = True
    least: int = _LEAST

    def __post_init__(self) -> None:
        assert self.exchanged or self.count == 1

    def columns(self, width: int) -> int:
        """The number of columns of a value of this width that one program has."""
        return max(self.least, _round_up_to_power(-(-width // self.count)))

    def chunks(self, width: int) -> list[int]:
        """Sizes of the chunks of a sum over `width` terms, with padding."""
        chunk = min(_pad(width), self.chunk)
        return [chunk] * -(-width // chunk)


@dataclass(frozen=True, slots=True)
class LoopKernel:
    """A kernel of a loop, and its operands.

    Attributes:
        source: the kernel's source. Its tensors have these roles:
            `INPUT` is an entry of `loads` at every step, and `OUTPUT` is an entry of `stores`.
            `STATE` and `FINAL_STATE` are the carried values before the first step and after the last step.
            `MATRIX` and `LIFTED` are matrices and lifted tensors.
            `RING` is memory for a carried value, `[2, rows, columns]`. Its index is that of the value.
            `OPERAND` contains the slots of an exchange, `[2, parts, rows, columns]` with padding.
            `COUNTER` 0 contains an int32 counter for each group of rows. The counters are 0 before the launch, and are
            `COUNTER_DISTANCE` apart.
            `COUNTER` 1 is a number that is set to 1 if programs gave up.
            `COUNTER` 2 is the int32 number of steps of each row, if rows end.
        loads, stores: views of the values that are loaded and stored at each step.
        slots: for each exchanged operand of products or of reductions, its dtype, its number of parts, and its number
            of columns with padding.
    """

    source: KernelSource
    loads: tuple[Load, ...]
    stores: tuple[View, ...]
    slots: tuple[tuple[torch.dtype, int, int], ...]


COUNTER_DISTANCE = 32  # distance of two counters in int32 numbers, so that each counter is in a separate cache line


def loop_source(name: str, spec: LoopSpec, tiles: Tiles) -> LoopKernel:
    """Writes the kernel of a loop. The kernel's name starts with `name`."""
    return _LoopWriter(spec, tiles).write(name)


def _round_up_to_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of terms of a product's sums. The terms of a block are multiplied together.

    Attributes:
        range: the kernel's name for the integers from 0 to `size - 1`.
        size: number of terms, with padding.
        offset: index of the first term. If it is negative, the terms with negative indices do not exist.
        end: index after the last term.
        value: the columns of the operand that the program has in registers, or `None` if the operand is exchanged.
    """

    range: str
    size: int
    offset: int
    end: int
    value: Columns | None

    def terms(self, axis: str) -> str:
        """Source text of the indices of the terms."""
        return f"({self.offset} + {self.range}[{axis}])"

    def inside(self, axis: str) -> str:
        """Source text of the condition under which a term exists, or `""` if all terms exist."""
        terms, conditions = self.terms(axis), []
        if self.offset < 0:
            conditions.append(f"({terms} >= 0)")
        if self.offset + self.size > self.end:
            conditions.append(f"({terms} < {self.end})")
        return " & ".join(conditions)


class _LoopWriter:
    def __init__(self, spec: LoopSpec, tiles: Tiles) -> None:
        loop = spec.loop
        self._spec, self._loop, self._tiles = spec, loop, tiles
        self._lines: list[str] = []
        self._depth = 1
        self._params: dict[Port, None] = {}
        self._sizes = ["T", "B"]
        self._exchange_numbers = {exchange.port: i for i, exchange in enumerate(loop.exchanges)}
        self._reduction_numbers = {port: len(loop.exchanges) + i for i, port in enumerate(loop.reduced)}
        self._carried = {port: f"state_{i}" for i, port in enumerate(loop.carried)}
        self._row_ports = {part.port for part in loop.parts if isinstance(part, Reduce)}
        self._delayed_stores: list[str] = []  # lines with stores that no program waits for
        # True if the stores of the last step that is computed are repeated for all later steps.
        self._repeats = spec.counts is not None and not spec.backwards
        self._next_store = 0

    # -- lines -----------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def _param(self, role: Role, index: int) -> str:
        port = Port(role, index)
        self._params[port] = None
        return f"{port.name}_ptr"

    # -- the kernel --------------------------------------------------------------------------------------------

    def write(self, name: str) -> LoopKernel:
        tiles = self._tiles
        self._line(f"tile = tl.program_id(0) % {tiles.count}")
        for width in sorted(self._list_widths()):
            self._line(f"own_{width} = tile * {tiles.columns(width)} + tl.arange(0, {tiles.columns(width)})")
        if tiles.exchanged:
            sizes = {size for e in self._loop.exchanges for size in tiles.chunks(e.width)}
            sizes |= {_pad(part.operand.width) for part in self._loop.parts if isinstance(part, Reduce)}
            for size in sorted(sizes):
                self._line(f"terms_{size} = tl.arange(0, {size})")
        self._load_matrices()
        groups = "tl.cdiv(B, BLOCK)"
        self._line("rows_in_all = tl.cast(B, tl.int64)")
        if tiles.exchanged:
            self._line(f"padded = {groups}.to(tl.int64) * BLOCK")
        # The step is rounded up. Otherwise, it would be 0 if fewer programs run than share a row, and the loop endless.
        first, step = f"tl.program_id(0) // {tiles.count}", f"tl.cdiv(tl.num_programs(0), {tiles.count})"
        self._line(f"for group in range({first}, {groups}, {step}):")
        self._depth += 1
        self._write_group()
        self._depth -= 1
        return self._finish(name)

    def _finish(self, name: str) -> LoopKernel:
        arguments = [f"{port.name}_ptr" for port in self._params] + self._sizes
        body = "\n".join(self._lines)
        cores = {core.name: core for core in self._spec.cores if core is not None}
        text = f"({', '.join(arguments)})\n{body}\n{list(cores)} {self._tiles}"
        doc = "All steps of a recurrent loop. One program: BLOCK rows, some columns of each value, all T."
        write = partial(jit_function, arguments=arguments, unspecialised=self._sizes, body=body, doc=doc)
        kernel = framed(name, TRITON, self._params, self._sizes, cores.values(), text, write)
        slots = tuple(self._list_slots()) if self._tiles.exchanged else ()
        return LoopKernel(kernel, tuple(x for x, _ in self._spec.loads), tuple(x for x, _ in self._spec.stores), slots)

    def _list_slots(self) -> Iterator[tuple[torch.dtype, int, int]]:
        for exchange in self._loop.exchanges:
            yield self._slot_dtype(exchange), self._count_parts(exchange), _pad(exchange.width)
        for width, dtype in self._loop.reduced.values():
            yield register_dtype(dtype), 1, _pad(width)

    def _list_widths(self) -> set[int]:
        widths = {width for width, _ in self._loop.carried.values()}
        for part in self._loop.parts:
            widths |= {part.width} if isinstance(part, StageCall) else {count for _, count in part.pieces}
        return widths

    # -- before the rows -----------------------------------------------------------------------------------------

    def _load_matrices(self) -> None:
        for i, part in enumerate(self._loop.parts):
            if not isinstance(part, Multiply):
                continue
            pointer = self._param(Role.MATRIX, part.matrix)
            down, across = self._spec.matrix_strides[part.matrix]
            for first, count in part.pieces:
                columns = f"own_{count}[None, :]"
                for j, block in enumerate(self._list_blocks(part.operand)):
                    inside = block.inside(":, None")
                    mask = f"{inside} & ({columns} < {count})" if inside else f"{columns} < {count}"
                    address = f"{pointer} + {block.terms(':, None')} * {down} + ({first} + {columns}) * {across}"
                    name = f"matrix_{i}_{first}_{j}"
                    in_parts = self._exchange_of(part.operand.port).dtype == torch.float32
                    if in_parts:
                        self._line(f"whole = dev.fetch({address}, {mask})")
                        self._split(name, "whole", self._spec.parts)
                    else:
                        self._line(f"{name}_0 = dev.fetch({address}, {mask})")
                    if not self._tiles.exchanged:
                        for k in range(self._spec.parts if in_parts else 1):
                            self._line(f"{name}_{k} = dev.hold({name}_{k}, BLOCK)")
                if part.added is not None:
                    row = self._param(Role.MATRIX, part.added)
                    (distance,) = self._spec.matrix_strides[part.added]
                    address = f"{row} + ({first} + own_{count}) * {distance}"
                    self._line(f"added_{i}_{first} = dev.load({address}, own_{count} < {count})[None, :]")

    def _split(self, name: str, value: str, parts: int) -> None:
        """Splits a float32 value into bfloat16 parts. Their sum is equal or close to the value."""
        for k in range(parts):
            self._line(f"{name}_{k} = dev.{'first' if k + 1 < parts else 'last'}_part({value})")
            if k + 1 < parts:
                self._line(f"rest_{name}_{k} = dev.rest({value})")
                value = f"rest_{name}_{k}"

    # -- a group of rows -------------------------------------------------------------------------------------------

    def _write_group(self) -> None:
        self._line("rows = (group * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]")
        for width in sorted(self._list_widths()):
            self._line(f"mask_{width} = (rows < B) & (own_{width}[None, :] < {width})")
        if self._tiles.exchanged:
            self._line(f"counter = {self._param(Role.COUNTER, 0)} + group * {COUNTER_DISTANCE}")
        self._load_lifted()
        for i, (port, (width, dtype)) in enumerate(self._loop.carried.items()):
            if port in self._loop.absent:
                kind = tl_name(register_dtype(dtype))
                self._line(f"state_{i} = tl.zeros([BLOCK, {self._tiles.columns(width)}], {kind})")
            else:
                pointer = self._param(Role.STATE, i)
                self._line(f"state_{i} = dev.load({pointer} + rows * {width} + own_{width}[None, :], mask_{width})")
            self._publish(Columns(port, 0, width), f"state_{i}", width, "0")
            if port in self._loop.ring:
                self._line(f"dev.store({self._ring_address(port, '0')}, state_{i}, mask_{width})")
        if self._loop.ring:
            self._line("dev.meet()")
        arrives, waits = set[int](), set[int]()
        if self._tiles.exchanged:
            events = self._list_events()
            arrives, waits = _find_synchronization(events)
            if not self._exchanged_ports().isdisjoint(self._loop.carried) and events[-1][1] == "write":
                self._line("dev.arrive(counter)")
                self._line("epoch = 1")
            else:
                self._line("epoch = 0")
        steps = "T"
        if self._spec.counts is not None:
            steps = "steps"
            self._write_end()
        self._line(f"step = {f'{steps} - 1' if self._spec.backwards else '0'}")
        exists = None if self._spec.counts is None else "(step >= 0)"
        for i in self._list_loads_ahead():
            self._load(f"load_{i}", i, "step", exists)
        for i, part in enumerate(self._loop.parts):
            if isinstance(part, StageCall) and part.early in (-1, 1):
                self._call(i, part, "step", exists)
        self._line(f"for t in range({steps}):")
        self._depth += 1
        if self._tiles.exchanged or self._loop.ring:
            self._line("odd = t & 1")
        self._write_step(arrives, waits)
        self._depth -= 1
        if self._repeats:
            self._store_at_later_steps("steps", _name_last)
        for i, (port, (width, _)) in enumerate(self._loop.carried.items()):
            if port not in self._loop.lasting:
                pointer = self._param(Role.FINAL_STATE, i)
                if port in self._loop.ring:
                    self._line(f"state_{i} = dev.load({self._ring_address(port, f'{steps} & 1')}, mask_{width})")
                self._line(f"dev.store({pointer} + rows * {width} + own_{width}[None, :], state_{i}, mask_{width})")
        if self._tiles.count > 1:
            self._give_up()

    def _write_end(self) -> None:
        """Computes the number of steps of a group's rows. In the backward, also stores the results of later steps."""
        pointer = self._param(Role.COUNTER, 2)
        self._line(f"left = dev.load({pointer} + rows, rows < B)")
        self._line("longest = tl.max(tl.max(tl.where(rows < B, left, 0), axis=1), axis=0)")
        self._line("behind = tl.minimum(tl.maximum(longest, 0), T)")
        if not self._spec.backwards:
            self._line("steps = tl.minimum(behind + 1, T)")
            for i, view, width, first in self._list_stores():
                self._line(f"{_name_last(i, first)} = {self._zeros(view, width)}")
            return
        self._line("steps = behind")
        self._store_at_later_steps("behind")

    def _store_at_later_steps(self, begin: str, name_last: Callable[[int, int], str] | None = None) -> None:
        """Writes the stores of all steps from `begin` on, in which the rows have ended.

        Args:
            name_last: a function that receives the index and the first column of a store, and returns the name of the
                value that the store repeats. By default, a store writes the gradient of the carried value, or zeros.
        """
        self._line(f"for place in range({begin}, T):")
        self._depth += 1
        self._line("pass")
        for i, view, width, first in self._list_stores():
            if name_last is not None:
                value = name_last(i, first)
            elif view.source in self._loop.ring:
                value = self._zeros(view, width)
            else:
                value = self._carried.get(view.source) or self._zeros(view, width)
            address = self._address(Role.OUTPUT, i, self._spec.stores[i][1], "place", width, first)
            self._line(f"dev.store({address}, {value}, mask_{width})")
        self._depth -= 1

    def _zeros(self, view: View, width: int) -> str:
        return f"tl.zeros([BLOCK, {self._tiles.columns(width)}], {tl_name(register_dtype(view.dtype))})"

    def _list_stores(self) -> list[tuple[int, View, int, int]]:
        """For each store, its index, its view, its number of columns, and its first column."""
        stored: list[tuple[int, View, int, int]] = []
        number = 0
        for part in self._loop.parts:
            if isinstance(part, StageCall):
                for view in part.stored:
                    if view is not None:
                        stored.append((number, view, part.width, 0))
                        number += 1
            elif part.stored is not None:
                stored += [(number, part.stored, count, first) for first, count in part.pieces]
                number += 1
        return stored

    def _load_lifted(self) -> None:
        for i, (part, core) in enumerate(zip(self._loop.parts, self._spec.cores, strict=True)):
            if not isinstance(part, StageCall) or core is None:
                continue
            for port in core.arguments:
                if port.role is Role.LIFTED:
                    pointer = self._param(Role.LIFTED, port.index)
                    down, across = two_strides(part.stage.shape, part.stage.graph.layouts[port.index].strides)
                    address = f"{pointer} + rows * {down} + own_{part.width}[None, :] * {across}"
                    self._line(f"lifted_{i}_{port.index} = dev.load({address}, mask_{part.width})")

    # -- a step ------------------------------------------------------------------------------------------------------

    def _list_events(self) -> list[tuple[int, str]]:
        """The reads and writes of exchanged values, each with its part. Only the last write of a value is listed."""
        last: dict[Port, int] = {}
        for i, part in enumerate(self._loop.parts):
            if isinstance(part, Multiply):
                if part.port in self._exchanged_ports():
                    last[part.port] = i
            elif isinstance(part, StageCall):
                last |= {w.port: i for w in part.writes if w is not None and w.port in self._exchanged_ports()}
        events = []
        for i, part in enumerate(self._loop.parts):
            if not isinstance(part, StageCall):
                events.append((i, "read"))
            if i in last.values():
                events.append((i, "write"))
        return events

    def _write_step(self, arrives: set[int], waits: set[int]) -> None:
        self._loaded_blocks: set[tuple[Columns, int]] = set()
        self._rows_by_columns: dict[Columns, str] = {}  # complete rows that the program has fetched for reductions
        self._values: dict[Columns, str] = {}  # values that the step has computed
        self._next_values: dict[Port, str] = {}
        self._ring_values: dict[Port, str] = {}  # values that the step has read from the ring
        self._next_store = 0
        loaded, multiplied = False, set[int]()
        backwards = self._spec.backwards
        following = ("(step - 1)", "(step > 0)") if backwards else ("(step + 1)", "(step + 1 < T)")
        for i, part in enumerate(self._loop.parts):
            if i in waits and self._tiles.count > 1:
                self._line(f"dev.wait(counter, epoch * {self._tiles.count})")
            if isinstance(part, Multiply):
                if i not in multiplied:
                    products = self._find_joint_products(i, part)
                    multiplied |= products.keys()
                    self._multiply(products)
            elif isinstance(part, Reduce):
                self._reduce(i, part)
            elif part.early == 1:
                self._call(i, part, *following)
            elif part.early != -1:
                self._call(i, part)
            if i in arrives:
                self._line("dev.arrive(counter)")
                self._line("epoch += 1")
                if i == max(arrives):
                    self._load_next()
                    loaded = True
                self._flush()
        if not loaded:
            self._load_next()
        self._flush()
        for port, value in self._next_values.items():
            self._line(f"{self._carried[port]} = {value}")
        for i in self._list_loads_ahead():
            self._line(f"load_{i} = next_{i}")
        if self._loop.ring or (self._loop.shifted and not arrives):  # threads load values that other threads store
            self._line("dev.meet()")
        self._line(f"step {'-' if self._spec.backwards else '+'}= 1")

    def _load_next(self) -> None:
        self._line(f"following = step {'-' if self._spec.backwards else '+'} 1")
        exists = "(following >= 0)" if self._spec.backwards else "(following < T)"
        for i in self._list_loads_ahead():
            self._load(f"next_{i}", i, "following", exists)

    def _list_loads_ahead(self) -> list[int]:
        """Indices of the loads that are issued one step earlier.

        Loads of values that the loop wrote some steps ago are excluded, because a value may have many of these loads,
        which would occupy the registers. Numbers of remaining steps are computed and not loaded.
        """
        excluded = {*self._loop.shifted, self._spec.counts}
        return [i for i, (load, _) in enumerate(self._spec.loads) if load.view.source not in excluded]

    def _flush(self) -> None:
        for line in self._delayed_stores:
            self._line(line)
        self._delayed_stores.clear()

    def _call(self, i: int, part: StageCall, step: str = "step", exists: str | None = None) -> None:
        """Computes a stage. Values of earlier steps are loaded for `step`, if the condition `exists` is true."""
        core = self._spec.cores[i]
        assert core is not None
        loads = [load for load, _ in self._spec.loads]
        arguments = []
        for port in core.arguments:
            if port.role is Role.LIFTED:
                arguments.append(f"lifted_{i}_{port.index}")
                continue
            read = part.reads[port.index]
            if isinstance(read, Gather):
                number = loads.index(Load(read.view, part.stage.shape))
                arguments.append(self._gather(f"picked_{i}_{port.index}", number, read, step, exists))
                continue
            if isinstance(read, View) and read.source in self._loop.shifted:
                number = loads.index(Load(read, part.stage.shape))
                self._load(f"load_{number}", number, step, exists)
            if isinstance(read, View) and read.source.role is Role.CAME_STATE:
                arguments.append("t > 0")
            elif isinstance(read, View) and read.source == self._spec.counts:
                arguments.append(f"tl.broadcast_to(left - {step}, [BLOCK, {self._tiles.columns(part.width)}])")
            elif isinstance(read, View):
                arguments.append(f"load_{loads.index(Load(read, part.stage.shape))}")
            elif read.port in self._row_ports:
                arguments.append(f"tl.broadcast_to({self._values[read]}, [BLOCK, {self._tiles.columns(part.width)}])")
            elif read.port in self._loop.ring:
                arguments.append(self._load_from_ring(read.port))
            elif read.port in self._carried:
                arguments.append(self._carried[read.port])
            elif read.port.role is Role.AHEAD:
                arguments.append(read.port.name)
            else:
                arguments.append(self._values[read])
        results = [f"result_{i}_{port.index}" for port in core.results]
        if part.early is not None:
            results = [columns.port.name for columns in part.writes if columns is not None]
        self._line(f"{', '.join(results)} = {core.name}({', '.join(arguments)})")
        for result, write in zip(results, part.writes, strict=True):
            if write is not None and part.early is None:
                self._record_value(write, result, part.width)
        for result, view in zip(results, part.stored, strict=True):
            if view is not None:
                self._store(result, part.width, 0)
                self._next_store += 1

    def _gather(self, name: str, load: int, gather: Gather, step: str, exists: str | None) -> str:
        """Loads a value at the step that a number selects. Returns the name of the loaded value."""
        number = gather.number.name
        self._line(f"{name}_there = ({number} >= {gather.first}) & ({number} < {gather.first + gather.count})")
        distance = f"tl.where({name}_there, {number} - {gather.first}, 0).to(tl.int64)"
        source_step = f"({step} {'-' if gather.back else '+'} {distance})"
        self._load(name, load, source_step, f"{name}_there & {exists}" if exists else f"{name}_there")
        return name

    def _reduce(self, i: int, part: Reduce) -> None:
        """Reduces rows, whose columns are in the program's registers, or are fetched."""
        columns = part.operand
        width, indices = columns.width, f"own_{columns.width}[None, :]"
        if self._tiles.exchanged:
            value, indices = self._fetch_rows(columns), f"terms_{_pad(width)}[None, :]"
        else:
            value = self._carried.get(columns.port) or self._values[columns]
        numbers = "".join(f", {number}" for number in self._numbers(part))
        result = f"row_{i}"
        self._line(f"{result} = dev.{_REDUCTIONS[part.product.op]}({value}, {indices} < {width}{numbers})")
        self._values[Columns(part.port, 0, 1)] = result
        if part.stored is not None:
            self._store(f"tl.broadcast_to({result}, [BLOCK, {self._tiles.columns(1)}])", 1, 0)
            self._next_store += 1

    def _fetch_rows(self, columns: Columns) -> str:
        """Fetches all columns of a value that programs exchange for reductions. Returns the name of the result."""
        name = self._rows_by_columns.get(columns)
        if name is None:
            number, (row_width, _) = self._reduction_numbers[columns.port], self._loop.reduced[columns.port]
            name = self._rows_by_columns[columns] = f"row_{number}_{columns.first}_{columns.width}"
            terms = f"terms_{_pad(columns.width)}[None, :]"
            address = f"{self._slot_address(number, row_width, 1, 'odd', 0)} + {columns.first} + {terms}"
            self._line(f"{name} = dev.fetch({address}, (rows >= 0) & ({terms} < {columns.width}))")
        return name

    def _numbers(self, part: Reduce) -> list[str]:
        """The numbers that a reduction takes: for a variance, 1 / columns and 1 / (columns - correction)."""
        if part.product.op is not _prims.var.default:
            return []
        correction = part.product.args[2] if len(part.product.args) > 2 else 1.0
        width = part.operand.width
        return [repr(1.0 / width), repr(1.0 / (width - correction)) if width > correction else 'float("inf")']

    def _find_joint_products(self, i: int, part: Multiply) -> dict[int, Multiply]:
        """Product `i`, and the following products that are computed together with it, by the index of the part."""
        products = {i: part}
        if self._tiles.exchanged and self._count_parts(self._exchange_of(part.operand.port)) > 1:
            for j, other in enumerate(self._loop.parts[i + 1 :], i + 1):
                is_exchanged = products[j - 1].port in self._exchanged_ports()
                if is_exchanged or not isinstance(other, Multiply) or other.operand != part.operand:
                    break
                products[j] = other
        return products

    def _multiply(self, products: Mapping[int, Multiply]) -> None:
        """Computes several products of the same operand."""
        operand = next(iter(products.values())).operand
        exchange = self._exchange_of(operand.port)
        name, chunks = self._operand_name(operand), range(len(self._list_blocks(operand)))
        dot = "dot" if self._tiles.exchanged else "dot_held"
        most = self._spec.parts
        terms = [(a, b) for a in range(self._count_parts(exchange)) for b in range(most) if a + b < most]
        if exchange.dtype != torch.float32:
            terms = [(0, 0)]
        # There is an independent sum for each product of two parts, or for each chunk if no operand is in parts.
        sums = terms if len(terms) > 1 else chunks
        pieces = [(i, first, count) for i, part in products.items() for first, count in part.pieces]
        for i, first, count in pieces:
            for k in range(len(sums)):
                size = self._tiles.columns(count)
                self._line(f"total_{i}_{first}_{k} = tl.zeros([BLOCK, {size}], tl.float32)")
        self._fetch(operand, 0, self._count_chunks_ahead(exchange))
        for j in chunks:
            self._fetch(operand, j + self._count_chunks_ahead(exchange), 1)
            for i, first, _ in pieces:
                for k, (a, b) in enumerate(terms):
                    total = f"total_{i}_{first}_{k if len(terms) > 1 else j}"
                    self._line(f"{total} = dev.{dot}({name}_{j}_{a}, matrix_{i}_{first}_{j}_{b}, {total})")
        for i, part in products.items():
            self._write_sum(i, part, terms, len(sums))

    def _write_sum(self, i: int, part: Multiply, terms: Sequence[tuple[int, int]], num_sums: int) -> None:
        """Computes the result of a product from its independent sums."""
        for first, count in part.pieces:
            totals = [f"total_{i}_{first}_{k}" for k in range(num_sums)]
            if len(terms) > 1:  # the smallest products are added first
                order = sorted(range(len(terms)), key=lambda k: -sum(terms[k]))
                text = " + ".join(totals[k] for k in order)
            else:
                text = _add_pairwise(totals)
            result = f"product_{i}_{first}"
            if part.alpha != 1:
                text = f"({text}) * {part.alpha!r}"
            if part.added is not None:
                added = f"added_{i}_{first}"
                text = f"{text} + {added}" if part.beta == 1 else f"{text} + {added} * {part.beta!r}"
            dtype = part.product.dtype
            rounded = f"dev.round_{str(dtype).removeprefix('torch.')}({text})" if dtype in HALF_DTYPES else text
            self._line(f"{result} = {rounded}")
            self._record_value(Columns(part.port, first, count), result, count)
            if part.stored is not None:
                self._store(result, count, first)
        if part.stored is not None:
            self._next_store += 1

    def _record_value(self, columns: Columns, value: str, width: int) -> None:
        self._values[columns] = value
        if columns.port in self._loop.ring:
            address = self._ring_address(columns.port, "1 - odd")
            self._delayed_stores.append(f"dev.store({address}, {value}, mask_{width})")
        elif columns.port in self._carried:
            self._next_values[columns.port] = value
        self._publish(columns, value, width, "1 - odd" if columns.port in self._carried else "odd")

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _exchange_of(self, port: Port) -> Exchange:
        return self._loop.exchanges[self._exchange_numbers[port]]

    def _count_parts(self, exchange: Exchange) -> int:
        return min(self._spec.parts, exchange.parts(from_zero=self._spec.from_zero))

    def _slot_dtype(self, exchange: Exchange) -> torch.dtype:
        return torch.bfloat16 if exchange.dtype == torch.float32 else exchange.dtype

    def _exchanged_ports(self) -> frozenset[Port]:
        return frozenset({*self._exchange_numbers, *self._reduction_numbers}) if self._tiles.exchanged else frozenset()

    def _slot_address(self, number: int, width: int, parts: int, slot: str, part: int) -> str:
        """Source text of the address at which the columns of a slot start, for each row."""
        pointer, size = self._param(Role.OPERAND, number), _pad(width)
        return f"{pointer} + ((({slot}) * {parts} + {part}) * padded + rows) * {size}"

    def _ring_address(self, port: Port, slot: str) -> str:
        """Source text of the addresses of the program's elements of a value in the ring."""
        number, (width, _) = list(self._loop.carried).index(port), self._loop.carried[port]
        pointer = self._param(Role.RING, number)
        return f"{pointer} + (({slot}) * rows_in_all + rows) * {width} + own_{width}[None, :]"

    def _load_from_ring(self, port: Port) -> str:
        """Loads the value that the previous step has stored in the ring. Returns its name."""
        name = self._ring_values.get(port)
        if name is None:
            name = self._ring_values[port] = f"ring_{list(self._loop.carried).index(port)}"
            width, _ = self._loop.carried[port]
            self._line(f"{name} = dev.load({self._ring_address(port, 'odd')}, mask_{width})")
        return name

    def _publish(self, columns: Columns, value: str, width: int, slot: str) -> None:
        """Publishes columns of a value for other programs, if other programs read the value."""
        if not self._tiles.exchanged:
            return
        indices = f"({columns.first} + own_{width}[None, :])"
        if columns.port in self._exchange_numbers:
            exchange = self._exchange_of(columns.port)
            parts = self._count_parts(exchange)
            names = [value]
            if parts > 1:
                name = f"part_{value}"
                self._split(name, value, parts)
                names = [f"{name}_{k}" for k in range(parts)]
            for k, text in enumerate(names):
                start = self._slot_address(self._exchange_numbers[columns.port], exchange.width, parts, slot, k)
                address = f"{start} + {indices}"
                self._line(f"dev.publish({address}, {text}, mask_{width})")
        if columns.port in self._reduction_numbers:
            row_width, _ = self._loop.reduced[columns.port]
            address = f"{self._slot_address(self._reduction_numbers[columns.port], row_width, 1, slot, 0)} + {indices}"
            self._line(f"dev.publish({address}, {value}, mask_{width})")

    def _count_chunks_ahead(self, exchange: Exchange) -> int:
        """The number of chunks of an operand that are loaded before the first chunk is multiplied."""
        return self._tiles.ahead if self._count_parts(exchange) == 1 else 1

    def _operand_name(self, operand: Columns) -> str:
        """The common prefix of the names of an operand's chunks and parts."""
        return f"operand_{self._exchange_numbers[operand.port]}_{operand.first}_{operand.width}"

    def _list_blocks(self, operand: Columns) -> list[_Block]:
        """The blocks of sums over an operand's columns: chunks of an exchanged operand, or values in registers."""
        blocks = []
        if self._tiles.exchanged:
            for j, size in enumerate(self._tiles.chunks(operand.width)):
                blocks.append(_Block(f"terms_{size}", size, j * size, operand.width, None))
            return blocks
        for value in self._list_pieces(operand.port):
            offset, size = value.first - operand.first, self._tiles.columns(value.width)
            end = min(offset + value.width, operand.width)
            if offset > -value.width and end > offset:
                blocks.append(_Block(f"own_{value.width}", size, offset, end, value))
        return blocks

    def _list_pieces(self, port: Port) -> list[Columns]:
        """The pieces in which a step computes a value, in the order of their columns."""
        if port in self._carried:
            return [Columns(port, 0, self._loop.carried[port][0])]
        pieces: set[Columns] = set()
        for part in self._loop.parts:
            if isinstance(part, StageCall):
                pieces |= {columns for columns in part.writes if columns is not None and columns.port == port}
            elif part.port == port:
                pieces |= {Columns(port, first, count) for first, count in part.pieces}
        return sorted(pieces, key=lambda columns: columns.first)

    def _fetch(self, operand: Columns, begin: int, count: int) -> None:
        """Loads `count` blocks of an operand for the program's rows into registers, unless they are loaded already."""
        blocks = self._list_blocks(operand)
        for j in range(begin, min(begin + count, len(blocks))):
            if (operand, j) in self._loaded_blocks:
                continue
            self._loaded_blocks.add((operand, j))
            self._load_block(operand, j, blocks[j])

    def _load_block(self, operand: Columns, j: int, block: _Block) -> None:
        exchange, number = self._exchange_of(operand.port), self._exchange_numbers[operand.port]
        name, inside = f"{self._operand_name(operand)}_{j}", block.inside("None, :")
        if block.value is None:
            mask = f"(rows >= 0) & {inside}" if inside else "rows >= 0"
            for k in range(self._count_parts(exchange)):
                slot = self._slot_address(number, exchange.width, self._count_parts(exchange), "odd", k)
                address = f"{slot} + {operand.first} + {block.terms('None, :')}"
                self._line(f"{name}_{k} = dev.fetch({address}, {mask})")
            return
        value = self._carried.get(operand.port) or self._values[block.value]
        if inside:  # the padding may contain infinity or NaN, whose product with 0 is NaN
            self._line(f"inside_{name} = tl.where({inside}, {value}, 0.0)")
            value = f"inside_{name}"
        if self._count_parts(exchange) > 1:
            self._split(name, value, self._count_parts(exchange))
        else:
            kind = str(self._slot_dtype(exchange)).removeprefix("torch.")
            self._line(f"{name}_0 = dev.as_{kind}({value})")

    # -- memory ------------------------------------------------------------------------------------------------------

    def _address(self, role: Role, i: int, layout: ValueLayout, step: str, width: int, first: int = 0) -> str:
        pointer = self._param(role, i)
        indices = f"({first} + own_{width}[None, :])" if first else f"own_{width}[None, :]"
        if layout.row is not None:
            return f"{pointer} + ({step} * rows_in_all + rows) * {layout.row} + {indices}"
        names = [f"{Port(role, i).name}_{dimension}" for dimension in ("time", "row", "column")]
        self._sizes += [name for name in names if name not in self._sizes]
        time, row, column = (f"tl.cast({name}, tl.int64)" for name in names)
        return f"{pointer} + {step} * {time} + rows * {row} + {indices} * {column}"

    def _load(self, name: str, i: int, step: str, exists: str | None) -> None:
        (_, shape), layout = self._spec.loads[i]
        width = shape[-1] if shape else 1
        mask = f"mask_{width} & {exists}" if exists else f"mask_{width}"
        self._line(f"{name} = dev.load({self._address(Role.INPUT, i, layout, step, width)}, {mask})")

    def _store(self, value: str, width: int, first: int) -> None:
        """Adds a store to the stores that are written later. Each piece of a product is stored separately."""
        i = self._next_store
        view, layout = self._spec.stores[i]
        if self._repeats:
            last = _name_last(i, first)
            self._line(f"{last} = ({value}).to({tl_name(register_dtype(view.dtype))})")
            value = last
        address = self._address(Role.OUTPUT, i, layout, "step", width, first)
        self._delayed_stores.append(f"dev.store({address}, {value}, mask_{width})")

    # -- giving up ---------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Overwrites all floating-point results with NaN if a program gave up waiting for other programs."""
        self._line("if dev.gave_up(counter):")
        self._depth += 1
        self._line(f"tl.store({self._param(Role.COUNTER, 1)}, 1)")
        nan = 'float("nan")'
        for i, (port, (width, dtype)) in enumerate(self._loop.carried.items()):
            if port not in self._loop.lasting and dtype.is_floating_point:
                block = f"tl.full([BLOCK, {self._tiles.columns(width)}], {nan}, {tl_name(register_dtype(dtype))})"
                pointer = self._param(Role.FINAL_STATE, i)
                self._line(f"dev.store({pointer} + rows * {width} + own_{width}[None, :], {block}, mask_{width})")
        self._line("for t in range(T):")
        self._depth += 1
        self._line("pass")
        for i, view, width, first in self._list_stores():
            if view.dtype.is_floating_point:
                kind = tl_name(register_dtype(view.dtype))
                block = f"tl.full([BLOCK, {self._tiles.columns(width)}], {nan}, {kind})"
                address = self._address(Role.OUTPUT, i, self._spec.stores[i][1], "t", width, first)
                self._line(f"dev.store({address}, {block}, mask_{width})")
        self._depth -= 2


def _name_last(store: int, first: int) -> str:
    """The kernel's name for the value of the last store with this index, whose first column is `first`."""
    return f"last_{store}_{first}"


def _pad(width: int) -> int:
    return max(_LEAST, _round_up_to_power(width))


def _add_pairwise(terms: Sequence[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return f"({_add_pairwise(terms[:middle])} + {_add_pairwise(terms[middle:])})"


def _find_synchronization(events: Sequence[tuple[int, str]]) -> tuple[set[int], set[int]]:
    """The parts after which a program arrives at the counter, and the parts before which it waits.

    Events are cyclic, because the step after the last event begins with the first event. A program arrives after the
    last of several writes, and waits before the first of several reads. So it always waits between two arrivals, and
    the value of the counter is sufficient to detect the progress of all programs.
    """
    arrives, waits = set(), set()
    for i, (part, kind) in enumerate(events):
        before, after = events[i - 1][1], events[(i + 1) % len(events)][1]
        if kind == "write" and after == "read":
            arrives.add(part)
        if kind == "read" and before == "write":
            waits.add(part)
    return arrives, waits
