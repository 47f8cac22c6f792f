"""C++ kernels in which a program computes `BLOCK` elements, in loops over lanes that the compiler vectorizes.

A program computes all steps of its elements, or the steps of one segment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._numbers import Number
from flexsn_codegen.source._source import CoreSource, Strided
from flexsn_codegen.targets._base import KernelWriter, Target
from flexsn_codegen.targets.cpp._literals import cpp_name, literal
from flexsn_graph import Port, Role

_NAME = re.compile(r"[A-Za-z_]\w*")
_GRADIENTS = (Role.GRAD_INPUT, Role.GRAD_STATE, Role.GRAD_LIFTED)  # the results of backward scans
_CONSTANTS = ("true", "false")  # values of flags that are constants of the source


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Assigns `text` to `name`. Without a name, `text` is a statement with a side effect."""

    name: str | None
    text: str

    def reads(self, names: frozenset[str]) -> frozenset[str]:
        return names.intersection(_NAME.findall(self.text))


@dataclass(slots=True)
class _Lanes:
    """A loop over the lanes of a block."""

    indent: int
    statements: list[_Assignment] = field(default_factory=list)
    before: list[str] = field(default_factory=list)  # lines before the loop, which are the same for all lanes
    after: list[str] = field(default_factory=list)  # lines after the loop
    flags: dict[str, str] = field(default_factory=dict)  # the last value of each flag in the loop, by name

    def names_assigned(self) -> frozenset[str]:
        return frozenset(s.name for s in self.statements if s.name is not None)

    def names_needed(self, names: frozenset[str]) -> frozenset[str]:
        """The names that the loop reads before it assigns them."""
        names_read: set[str] = set()
        names_assigned: set[str] = set()
        for statement in self.statements:
            names_read |= statement.reads(names) - names_assigned
            if statement.name is not None:
                names_assigned.add(statement.name)
        return frozenset(names_read)


class CppWriter(KernelWriter):
    """Writes kernels in C++.

    In the source, `begin` is the position of the block's first element in the step, `lanes` is the number of elements
    in the block, and `lane` is the index of an element in the block. `<operand>_block` points to the operand's first
    step, and for a dense operand to the block's first element in that step. `<operand>_at` points to the operand's
    current step in the same way.

    A value is a variable of one lane. The lines between two control statements become one loop over the lanes. A value
    that is computed in one loop and read in another loop is stored in an array for the block.
    """

    branches = True

    def __init__(self, target: Target, strided: Strided, sizes: Sequence[str]) -> None:
        super().__init__(target, strided, sizes)
        self._body: list[str | _Lanes] = []
        self._lanes: _Lanes | None = None
        self._offsets: dict[Port, str] = {}  # the text of the offset of a lane within a step
        self._terms: dict[Port, Sequence[tuple[str, str, str]]] = {}  # see `KernelWriter._declare`
        self._times: dict[Port, str] = {}
        self._written: set[Port] = set()
        self._first_texts: dict[str, str] = {}  # the first text of each value, which determines its type
        self._stored: list[Port] = []  # operands with a store that has a condition
        self._summed: list[str] = []  # values whose sum each program writes
        self._block_values: list[str] = []  # values that are passed as arrays to functions of the block
        self._flags: dict[str, int] = {}  # number of assignments to each flag
        self._calls = 0
        self._first_segment: int | None = None  # number of the first segment if each program computes one segment

    # -- lines and lanes -----------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self._lanes = None
        self._body.append("    " * (self._indent + 1) + text)

    def _current_lanes(self) -> _Lanes:
        if self._lanes is None or self._lanes.indent != self._indent:
            self._lanes = _Lanes(self._indent)
            self._body.append(self._lanes)
        return self._lanes

    def _lane(self, name: str | None, text: str, before: str | None = None) -> None:
        lanes = self._current_lanes()
        lanes.statements.append(_Assignment(name, self._replace_flags(text, f"({self._lane_condition('{}')})")))
        if before is not None:
            lanes.before.append(before)
        if name is not None:
            self._first_texts.setdefault(name, text)

    def _replace_flags(self, text: str, form: str = "{}") -> str:
        """The text, with each flag replaced by its current value, formatted by `form`.

        A flag may change in the lines that become one loop over lanes. Its values are computed before the loop, because
        they are the same for all lanes.
        """
        flags = {**dict.fromkeys(self._flags), **self._current_lanes().flags}
        values = {name: value if value in _CONSTANTS else form.format(value or name) for name, value in flags.items()}
        return _NAME.sub(lambda match: values.get(match[0], match[0]), text)

    def _assign_flag(self, name: str, text: str) -> None:
        lanes, count = self._current_lanes(), self._flags.get(name, 0)
        value = self._replace_flags(text)
        if "?" not in value and "true" in value.split(" | "):
            value = "true"
        if value not in _CONSTANTS:  # a constant needs no variable
            lanes.before.append(f"const bool {name}_{count} = {value};")
            value = f"{name}_{count}"
        lanes.flags[name] = value
        self._flags[name] = count + 1

    def _lane_condition(self, condition: str) -> str:
        """A condition that is the same for all lanes, in a form that a loop over lanes can contain."""
        return f"dev::conditions<condition_t, BLOCK>.all({_to_cpp(condition)})[lane] != 0"

    # -- operands ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        pass

    def add_once(self, core: CoreSource, numbers: Sequence[str]) -> list[str]:
        if any(self._terms.values()):
            # The loads are in a separate loop. Not every processor loads a vector of scattered elements quickly, so the
            # compiler may not vectorize a loop with such loads.
            self._lanes = None
        return super().add_once(core, numbers)

    def _declare(self, port: Port, terms: Sequence[tuple[str, str, str]] | None, *, strided_time: bool) -> None:
        self._times[port] = f"{port.name}_time" if strided_time else self._elements
        if terms is not None:
            self._offsets[port] = f"{port.name}_offset_of[lane]" if terms else "0"
            self._terms[port] = terms

    def number(self, number: Number) -> None:
        words = ", ".join(number.arguments)
        self.line(f"const auto {number.name} = dev::number<{cpp_name(number.dtype)}>({words});")

    def _is_dense(self, port: Port) -> bool:
        return port not in self._offsets and port not in self._sums and port not in self._bits

    def _step_distance(self, port: Port) -> str:
        """Source text of the distance between two time steps, in elements."""
        if port in self._bits:
            return f"({_to_cpp(self._row)})"
        return "programs" if port in self._sums else self._times[port]

    def point(self, port: Port, chunks: str = "", length: int = 1) -> None:
        rows = f" + {chunks} * {length} * {self._step_distance(port)}" if chunks else ""
        self.line(f"auto {port.name}_at = {port.name}_block{rows};")

    def at(self, port: Port, step: int = 0) -> str:
        return f"{port.name}_at" + (f" + {step} * {self._step_distance(port)}" if step else "")

    def row(self, port: Port, number: str, shift: int = 0) -> str:
        row = f"({_to_cpp(number)} - {-shift})" if shift else f"({_to_cpp(number)})"
        return f"{port.name}_block + {row} * {self._step_distance(port)}"

    def move(self, port: Port, steps: int) -> None:
        sign, count = ("-", -steps) if steps < 0 else ("+", steps)
        self.line(f"{port.name}_at {sign}= {count} * {self._step_distance(port)};")

    def load(self, name: str, port: Port, place: str | None = None, exists: str | None = None) -> None:
        pointer = place or f"{port.name}_block"
        if exists is None:
            self._lane(name, _load_expression(pointer, self._offsets.get(port, "lane")))
        elif self._is_dense(port):
            # The condition is outside of the loop over lanes, because the compiler does not vectorize a loop that
            # contains it.
            declaration = f"const auto {name}_from = {_to_cpp(exists)} ? {pointer} : dev::zeros<{port.name}_t, BLOCK>;"
            self._lane(name, f"dev::load({name}_from[lane])", declaration)
        else:
            value = _load_expression(pointer, self._offsets[port])
            self._lane(name, f"{_to_cpp(exists)} ? {value} : decltype({value})(0)")

    def store(self, port: Port, value: str, place: str | None = None, exists: str | None = None) -> None:
        self._written.add(port)
        pointer = place or f"{port.name}_block"
        if port in self._sums:
            total = f"{port.name}_sum_{len(self._summed)}"
            self._summed.append(total)
            self._first_texts[total] = f"dev::load({port.name}_ptr[0])"
            self._lane(total, value)
            condition = f"if ({_to_cpp(exists)}) " if exists else ""
            store = f"{condition}dev::store(({pointer})[program], dev::sum({_array_name(total)}, lanes));"
            self._current_lanes().after.append(store)
        elif exists is None:
            self._lane(None, f"dev::store(({pointer})[{self._offsets.get(port, 'lane')}], {value})")
        elif self._is_dense(port):
            destination = f"{port.name}_to_{len(self._stored)}"
            self._stored.append(port)
            declaration = f"const auto {destination} = {_to_cpp(exists)} ? {pointer} : {port.name}_beyond;"
            self._lane(None, f"dev::store({destination}[lane], {value})", declaration)
        else:
            place = f"({pointer})[{self._offsets[port]}]"
            self._lane(None, f"if ({_to_cpp(exists)}) dev::store({place}, {value})")

    def store_bits(self, port: Port, value: str, place: str, exists: str | None = None) -> None:
        self._written.add(port)
        flags = f"{port.name}_flags_{len(self._block_values)}"
        self._block_values.append(flags)
        self._first_texts[flags] = "uint8_t(0)"
        self._lane(flags, f"uint8_t({value} != 0)")
        condition = f"if ({_to_cpp(exists)}) " if exists else ""
        self._current_lanes().after.append(f"{condition}dev::store_bits({place}, {_array_name(flags)}, lanes);")

    # -- values --------------------------------------------------------------------------------------------

    def zeros(self, dtype: torch.dtype) -> str:
        return literal(0, dtype)

    def assign(self, name: str, text: str, *, flag: bool = False) -> None:
        if flag:
            self._assign_flag(name, text)
        else:
            self._lane(name, text)

    def select(self, name: str, condition: str, text: str, other: str, *, flag: bool = False) -> None:
        if flag:
            self._assign_flag(name, f"{_to_cpp(condition)} ? {text} : {other}")
        else:
            self._lane(name, f"{self._lane_condition(condition)} ? {text} : {other}")

    def accumulate(self, name: str, value: str, dtype: torch.dtype | None = None, condition: str | None = None) -> None:
        term = value if dtype is None else f"{cpp_name(register_dtype(dtype))}({value})"
        total = f"{name} + {term}"
        self._lane(name, total if condition is None else f"{self._lane_condition(condition)} ? {total} : {name}")

    def call(self, results: Sequence[str], core: CoreSource, arguments: Sequence[str]) -> None:
        all_results = f"results_{self._calls}"
        self._calls += 1
        self._lane(all_results, f"{core.name}({', '.join(arguments)})")
        for i, name in enumerate(results):
            self._lane(name, f"dev::get<{i}>({all_results})")

    def flag(self, value: bool) -> str:
        return "true" if value else "false"

    # -- control -------------------------------------------------------------------------------------------

    def integer(self, name: str, expression: str) -> None:
        self.line(f"const int64_t {name} = {_to_cpp(expression)};")

    def loop(self, variable: str, start: str, end: str, stages: int = 1) -> AbstractContextManager[None]:
        first, last = _to_cpp(start), _to_cpp(end)
        return self._block(f"for (int64_t {variable} = {first}; {variable} < {last}; ++{variable})")

    def when(self, condition: str) -> AbstractContextManager[None]:
        return self._block(f"if ({_to_cpp(condition)})")

    def segment(self, first: int = 0) -> None:
        self._sizes += ["SEGMENTS", "BESIDE"]
        self._first_segment = first

    def differ(self, name: str, value: str, other: str, dtype: torch.dtype) -> None:
        self._lane(name, f"dev::differ({value}, {other})")

    def not_finite(self, name: str, value: str) -> None:
        self._lane(name, f"int32_t({value} - {value} != 0)")

    def bounds(self, least: str, largest: str, values: Sequence[str]) -> None:
        named = {least: "least", largest: "largest"}
        for name, function in named.items():
            arrays = [f"{name}_of_{value}" for value in values]
            for array, value in zip(arrays, values, strict=True):
                self._block_values.append(array)
                self._first_texts[array] = "int32_t(0)"
                self._lane(array, value)
            first, *others = (f"dev::{function}({_array_name(array)}, lanes, T)" for array in arrays)
            for other in others:
                first = f"dev::{'minimum' if name == least else 'maximum'}({first}, {other})"
            self.line(f"const int64_t {name} = {first};")

    def less(self, name: str, value: str, number: str) -> None:
        self._lane(name, f"{value} - int32_t({_to_cpp(number)})")

    def choose(self, name: str, number: str, text: str, other: str) -> None:
        self._lane(name, f"{number} > 0 ? {text} : {other}")

    def any(self, name: str, value: str) -> None:
        flags = f"{name}_flags"
        self._block_values.append(flags)
        self._first_texts[flags] = "int32_t(0)"
        self._lane(flags, value)
        self.line(f"const int64_t {name} = dev::any({_array_name(flags)}, lanes);")

    @contextmanager
    def _block(self, header: str) -> Iterator[None]:
        self.line(f"{header} {{")
        with self.indented():
            yield
        self.line("}")

    # -- the kernel ----------------------------------------------------------------------------------------

    def _text(self) -> str:
        loops = [part for part in self._body if isinstance(part, _Lanes)]
        names = frozenset(self._first_texts)
        stored = frozenset((*self._summed, *self._block_values)).union(*(loop.names_needed(names) for loop in loops))
        dense = {port: " + begin" if self._is_dense(port) else "" for port in self._params}
        dense |= dict.fromkeys(self._bits, " + begin / 8")
        lines = [f"const auto {port.name}_block = {port.name}_ptr{begin};" for port, begin in dense.items()]
        first: dict[tuple[tuple[str, str, str], ...], Port] = {}
        for port, terms in self._terms.items():  # operands with equal terms share offsets, which need divisions
            if not terms:
                continue
            like = first.setdefault(tuple(terms), port)
            if like != port:
                lines.append(f"const auto& {port.name}_offset_of = {like.name}_offset_of;")
                continue
            lines.append(f"int64_t {port.name}_offset_of[BLOCK] = {{}};")
            for inner, size, stride in terms:
                lines.append(f"dev::add_offsets({port.name}_offset_of, begin, lanes, {inner}, {size}, {stride});")
        # Arrays are in the order in which values are first computed, because the type of a value may depend on the
        # type of an earlier value.
        arrays = [name for name in self._first_texts if name in stored]
        lines += [f"decltype(dev::value({self._type_expression(name)})) {_array_name(name)}[BLOCK];" for name in arrays]
        lines += [f"bool {name} = false;" for name in self._flags]
        lines += [f"{port.name}_t {port.name}_beyond[BLOCK];" for port in dict.fromkeys(self._stored)]
        parts = [part if isinstance(part, str) else self._write_lanes(part, names, stored) for part in self._body]
        return "\n".join([*(f"        {line}" for line in lines), *parts])

    def _type_expression(self, name: str) -> str:
        """An expression that has the type of a value and is valid outside of the loops over lanes."""
        return re.sub(r"\blane\b", "0", self._first_texts[name])

    def _write_lanes(self, loop: _Lanes, names: frozenset[str], stored: frozenset[str]) -> str:
        outer = "    " * (loop.indent + 1)
        inner = outer + "    "
        lines = [f"{outer}{line}" for line in loop.before]
        after = [f"{outer}{line}" for line in loop.after]
        after += [f"{outer}{name} = {value};" for name, value in loop.flags.items()]
        if not loop.statements:
            return "\n".join([*lines, *after])
        lines += [f"{outer}DEV_LANES", f"{outer}for (int64_t lane = 0; lane < lanes; ++lane) {{"]
        needed, assigned = loop.names_needed(names), loop.names_assigned()
        declared = set(needed)
        lines += [f"{inner}auto {name} = {_array_name(name)}[lane];" for name in self._first_texts if name in needed]
        for statement in loop.statements:
            if statement.name is None:
                lines.append(f"{inner}{statement.text};")
                continue
            lines.append(f"{inner}{'' if statement.name in declared else 'auto '}{statement.name} = {statement.text};")
            declared.add(statement.name)
        stored_here = stored & assigned
        lines += [f"{inner}{_array_name(name)}[lane] = {name};" for name in self._first_texts if name in stored_here]
        return "\n".join([*lines, f"{outer}}}", *after])

    def _kernel(self, name: str, arguments: Sequence[str], body: str, doc: str) -> str:
        types = ", ".join(f"typename {port.name}_t" for port in self._params)
        tensors = [
            f"{'' if port in self._written else 'const '}{port.name}_t* __restrict {port.name}_ptr"
            for port in self._params
        ]
        signature = ",\n    ".join([*tensors, *(f"int64_t {size}" for size in self._sizes), "int64_t threads"])
        elements = self._elements
        work = f"{elements} * T" if "T" in self._sizes else elements
        wide = "DEV_WIDE " if any(port.role in _GRADIENTS for port in self._params) else ""
        conditions = ""
        if "condition_t" in body:
            names = ", ".join(f"{port.name}_t" for port in self._params)
            conditions = f"    using condition_t = dev::condition_t<{names}>;\n"
        count, program = "programs", "program"
        segment_lines = ""
        if self._first_segment is not None:
            count, program, work = "programs * BESIDE", "place", f"({work})"
            segment_lines = f"""
        const int64_t program = place % programs;
        const int64_t segment = place / programs + {self._first_segment};"""
        return f"""// {doc}
template <int64_t BLOCK, {types}>
{wide}static void {name}(
    {signature}) {{
{conditions}    const int64_t programs = ({elements} + BLOCK - 1) / BLOCK;
    const int64_t team = dev::team(threads, {count}, {work});
    #pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t {program} = 0; {program} < {count}; ++{program}) {{{segment_lines}
        const int64_t begin = program * BLOCK;
        const int64_t lanes = begin + BLOCK < {elements} ? BLOCK : {elements} - begin;
{body}
    }}
}}
"""


def _to_cpp(expression: str) -> str:
    """Converts a scalar integer expression from Python's syntax."""
    return expression.replace("//", "/")


def _load_expression(pointer: str, offset: str) -> str:
    return f"dev::load(({pointer})[{offset}])"


def _array_name(name: str) -> str:
    return f"{name}_of"
