"""Interface of a target: names of dtypes, numbers, a rule per op, functions, loads and stores, and loops.

The templates of kernels (`flexsn_codegen.scan`, `_pointwise`) are written once, against a `KernelWriter`. They hand it
scalar expressions of whole numbers in Python's syntax, with ``+ - * // % > < ==`` and ``&`` between comparisons. None
of their operands is negative, so that `//` and `%` are what they are in any language.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from flexsn_codegen._torch_private_ops import OpOverload
from flexsn_codegen.errors import UnsupportedOpError
from flexsn_codegen.source._numbers import Number
from flexsn_codegen.source._source import (
    DENSE,
    RUN,
    CoreSource,
    InputLayout,
    KernelSource,
    Like,
    StepLayout,
    Strided,
    framed,
)
from flexsn_codegen.source._walk import by_terms
from flexsn_graph import Port, Role, facts_of

Op = OpOverload

WORD = 32
"""Bits per word: those of a step fill whole words, and so do those that one program writes of it."""


class Approximate(Enum):
    """Operations that may be computed approximately."""

    NOTHING = auto()
    DIVISION = auto()  # to 2 ulp
    EVERYTHING = auto()


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op, as its rule sees it.

    Attributes:
        op: the op.
        operands: the source text of each tensor or number argument, in order.
        constants: the value of each operand that is a number, `None` for tensors and for arguments of the kernel.
        dtype: dtype of the tensor operands (of the result, where there is none).
        result: dtype of the result.
        target: what is written for.
        index: the number of the required result, where the op has several.
        keywords: by name, the arguments that are neither tensors nor numbers, and those given by keyword.
        computed: for each operand that is a number and an argument of the kernel: of a function of it, the source text.
    """

    op: Op
    operands: tuple[str, ...]
    constants: tuple[bool | int | float | None, ...]
    dtype: torch.dtype
    result: torch.dtype
    target: Target
    index: int = 0
    keywords: Mapping[str, object] = field(default_factory=dict)
    computed: Mapping[int, Callable[[Callable[[float], float]], str]] = field(default_factory=dict)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_bool(self) -> bool:
        return self.dtype == torch.bool

    @property
    def is_unsigned(self) -> bool:
        return not self.is_float and not self.dtype.is_signed

    def number(self, value: bool | int | float) -> str:
        """`value` as a literal of the operands' dtype."""
        return self.target.literal(value, self.dtype)

    def is_number(self, position: int) -> bool:
        """True if an operand is one number for all elements."""
        return self.constants[position] is not None or position in self.computed

    def number_of(self, position: int, function: Callable[[float], float]) -> str:
        """Text of `function`, in float64, of an operand that is a number: a literal, or an argument where it is one."""
        constant = self.constants[position]
        return self.computed[position](function) if constant is None else self.number(function(constant))

    def refuse(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"{self.op} on {self.dtype}: {why}", str(self.op))


Rule = Callable[[OpCall], str]


@dataclass(frozen=True, slots=True)
class Statement:
    """`name` is `text`; `citation`: the user's line that it comes from, or nothing."""

    name: str
    text: str
    citation: str = ""


class Summed(Enum):
    """How a result of a kernel on rows and columns is summed."""

    NOT = auto()
    OVER_ROWS = auto()  # of a program: one sum for each column
    OVER_COLUMNS = auto()  # of the whole row


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Programs of a kernel on rows and columns.

    Attributes:
        columns: of a program; on a GPU padded to a power of two.
        programs: number of programs among rows; each has its own sums over rows.
        beside: number of programs among columns.
        steps: of a program that sums over rows: blocks of rows on a GPU, rows in C++.
        block, warps: elements of a block, and warps of a program on a GPU.
    """

    columns: int
    programs: int
    beside: int = 1
    steps: int = 1
    block: int = 1
    warps: int = 1


class Target(ABC):
    """A language that kernels are written in.

    Half values are float32 in registers, rounded wherever eager mode rounds; memory keeps the narrow dtype.

    Attributes:
        name: of the language, for messages.
        reserved: names that mean something in generated sources.
        header: what every module of generated source begins with.
        once: whether what is the same in each step has to be computed before the loop over time, because a compiler
            would not move it there.
        rows: whether programs can walk rows of a step.
        segments: True if programs can walk segments of time side by side.
        reduces_rows: True if it has kernels on rows and columns (`row_kernel`).
        weaves: True if it has kernels that write interleaved results (`woven_kernel`).
        columns_in_runs: True if these need columns that are evenly spaced in each operand.
        most_columns: of a row that they sum best.
        rules: how each op is written.
    """

    name: str
    reserved: Collection[str] = ()
    header: str = ""
    once: bool = False
    rows: bool = False
    segments: bool = False
    reduces_rows: bool = False
    weaves: bool = False
    columns_in_runs: bool = False
    most_columns: int = sys.maxsize

    def __init__(self) -> None:
        self.rules: dict[Op, Rule] = {}

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """True if it has values of this dtype."""

    @abstractmethod
    def literal(self, value: bool | int | float, dtype: torch.dtype) -> str:
        """A typed number, of the dtype that registers hold values of `dtype` in."""

    @abstractmethod
    def rounded(self, text: str, dtype: torch.dtype) -> str:
        """`text`, rounded to `dtype` if that is narrower than the registers it is computed in."""

    @abstractmethod
    def filled(self, number: str, like: str) -> str:
        """A number in each element of a value shaped as `like`."""

    @abstractmethod
    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        """The function of one step."""

    @abstractmethod
    def writer(self, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        """Collects one kernel."""

    @abstractmethod
    def compile(self, source: KernelSource) -> Any:
        """Makes the object that launches the kernel of a source."""

    def walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        """Layouts of a pointwise kernel's operands, which its source depends on, and the integers that it takes for
        them, after the number of elements.

        Args:
            sizes: of the dimensions, outermost first, without those of one element.
            strides: of each operand.
        """
        return by_terms(sizes, strides)

    def plain_walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        """As `walk`, in layouts that files of source that stands alone know."""
        return self.walk(sizes, strides)

    def pointwise(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        """The kernel `(*inputs that are used, *results, N, *numbers of the layouts, *numbers)` of a function of one
        element.

        Args:
            name: begins the kernel's name.
            layouts: from `walk`, for the operands in this order.
            may_overlap: what is written may be what is read.
        """
        w = self.writer(sizes=["N"])
        w.begin()
        ports = w.add_operands((*core.arguments, *core.results), layouts)
        inputs, results = ports[: len(core.arguments)], ports[len(core.arguments) :]
        numbers = w.add_numbers(core)
        for port in inputs:
            w.load(port.name, port)
        w.call([port.name for port in results], core, [*(port.name for port in inputs), *numbers])
        for port in results:
            w.store(port, port.name)
        return w.finish(name, [core], "One program: BLOCK elements.")

    def woven_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], count: int) -> KernelSource:
        """As `pointwise`, of a function whose results are interleaved: `N` is the number of elements of all `count`.

        Args:
            layouts: from `walk`, for the inputs, and the first of each `count` results.
            count: number of results that follow each other in memory.
        """
        raise NotImplementedError

    def row_launch(self, core: CoreSource, count: int, width: int, *, reduces: bool, sums: bool) -> RowLaunch:
        """Programs of a kernel on rows and columns.

        Args:
            core: the function that it computes.
            count, width: numbers of rows and of columns.
            reduces: True if it reduces rows.
            sums: True if some of its results are sums over rows.

        Raises:
            UnsupportedOpError: its rows are too long to be reduced.
        """
        raise NotImplementedError

    def walk_rows(
        self,
        sizes: Sequence[int],
        strides: Sequence[Sequence[int]],
        split: int,
        launch: RowLaunch,
        sums: Sequence[Summed],
        after: Sequence[int | None],
    ) -> tuple[tuple[Any, ...], list[int]]:
        """As `walk`, for a kernel on rows and columns; a size may be one.

        Args:
            split: number of dimensions that rows are counted in; the others are those of columns.
            launch: from `row_launch`.
            sums: for each operand. Memory of `OVER_ROWS` is dense, one sum for each program and column.
            after: for each operand, the number of the earlier one that it is interleaved with, element by element, and
                each of whose elements is just before its own; `None`: there is none.
        """
        raise NotImplementedError

    def row_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        """As `pointwise`, of a function with stages: `N` is the number of rows.

        Args:
            layouts: from `walk_rows`.
        """
        raise NotImplementedError

    def approximated(self, text: str, approximate: Approximate) -> str:
        """The text of an op with approximate functions instead of others; by default, none."""
        return text

    def expression(self, call: OpCall, *, rounded: bool = True, approximate: Approximate = Approximate.NOTHING) -> str:
        """The text of an op.

        Args:
            rounded: round a half value, as eager mode does after each op.
        """
        rule, facts = self.rules.get(call.op), facts_of(call.op)
        if rule is None or facts is None:
            raise UnsupportedOpError(
                f"{call.op} has no rule. Write it in other ops, or add one with flexsn_codegen.register_op.",
                str(call.op),
            )
        text = self.approximated(rule(call), approximate)
        return self.rounded(text, call.result) if rounded and not facts.exact else text


class KernelWriter(ABC):
    """Collects the arguments and lines of one kernel.

    A value is a name, and covers all elements of a step that one run of the kernel's lines computes together. A place
    is the text of where one step of an operand is. Of some operands the elements of a step are summed and written as
    one number per run.

    Args:
        target: what is written for.
        strided: layouts of operands that are declared without one, and are not dense.
        sizes: the first integer arguments; the last of them is the number of elements of a step.

    Attributes:
        branches: whether steps that do not exist are best left out by a branch; elsewhere they are masked.
    """

    branches = False

    def __init__(self, target: Target, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> None:
        self.target = target
        self._strided = dict(strided)
        self._lines: list[str] = []
        self._indent = 1
        self._params: list[Port] = []
        self._sizes = list(sizes)
        self._elements = self._sizes[-1]
        self._sums: set[Port] = set()
        self._bits: set[Port] = set()
        self._once: list[CoreSource] = []

    # -- lines -------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """A line of the target's own text."""
        self._lines.append("    " * self._indent + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self._indent += 1
        yield
        self._indent -= 1

    # -- operands ----------------------------------------------------------------------------------------

    def add(
        self,
        role: Role,
        index: int,
        layout: StepLayout = DENSE,
        *,
        strided_time: bool = False,
        like: Port | None = None,
    ) -> Port:
        """Declares a tensor argument and its offset within a step.

        Args:
            like: one that is declared, with the same layout and the same numbers in it.
        """
        port = Port(role, index)
        known = self._strided.get(port)
        if known is not None:
            layout, strided_time = known.step, known.strided_time
        self._params.append(port)
        if strided_time:
            self._sizes.append(f"{port.name}_time")
        terms = []
        if layout == RUN:
            stride = f"{(like or port).name}_stride"
            if like is None:
                self._sizes.append(stride)
            terms.append(("", "", stride))
        for i in range(layout if layout != DENSE else 0):
            inner, size, stride = (f"{(like or port).name}_{what}{i}" for what in ("inner", "size", "stride"))
            if like is None:
                self._sizes += [inner, size, stride]
            terms.append((inner, size, stride))
        self._declare(port, None if layout == DENSE else terms, strided_time=strided_time)
        return port

    def add_operands(self, ports: Sequence[Port], layouts: Sequence[StepLayout | Like]) -> Sequence[Port]:
        """Declares operands of layouts from `Target.walk`, and returns them."""
        for port, layout in zip(ports, layouts, strict=True):
            if isinstance(layout, Like):
                of = layouts[layout.operand]
                assert not isinstance(of, Like)
                self.add(port.role, port.index, of, like=ports[layout.operand])
            else:
                self.add(port.role, port.index, layout)
        return ports

    def add_inputs(self, layouts: Sequence[InputLayout], used: Collection[Port]) -> dict[int, Port]:
        """Declares the inputs, by number, that are among the arguments `used`."""
        return {
            i: self.add(Role.INPUT, i, layout.step, strided_time=layout.strided_time)
            for i, layout in enumerate(layouts)
            if Port(Role.INPUT, i) in used
        }

    def add_lifted(
        self, layouts: Sequence[StepLayout], used: Collection[Port], like: Sequence[int] = ()
    ) -> dict[int, Port]:
        """Declares the lifted tensors, by number, that are among the arguments `used`.

        Args:
            like: as `ForwardSpec.lifted_like`.
        """
        declared: dict[int, Port] = {}
        first: dict[int, Port] = {}
        for i, layout in enumerate(layouts):
            if Port(Role.LIFTED, i) in used:
                group = like[i] if like else i
                declared[i] = self.add(Role.LIFTED, i, layout, like=first.get(group))
                first.setdefault(group, declared[i])
        return declared

    def add_present(self, role: Role, present: Sequence[bool], summed: Sequence[bool] = ()) -> dict[int, Port]:
        """Declares the tensors of one role, by number, that are present.

        Args:
            summed: of which each run writes one number; empty: of none.
        """
        ports = {i: self.add(role, i) for i, there in enumerate(present) if there}
        self._sums |= {port for i, port in ports.items() if summed and summed[i]}
        return ports

    def add_bits(self, present: Sequence[bool]) -> dict[int, Port]:
        """Declares the bits of outputs, by the number of the output: 8 elements of a step in each byte; the bytes of
        a step fill whole words of `WORD` elements.
        """
        ports = {i: Port(Role.BITS, i) for i, there in enumerate(present) if there}
        self._bits |= set(ports.values())
        for port in ports.values():
            self.add(port.role, port.index)
        return ports

    @property
    def _row(self) -> str:
        """Number of bytes that the bits of one step take."""
        return f"({self._elements} + {WORD - 1}) // {WORD} * {WORD // 8}"

    def add_numbers(self, core: CoreSource) -> list[str]:
        """Declares the numbers that a step takes; returns their names, which are its last arguments."""
        for number in core.numbers:
            self._sizes += number.arguments
            self.number(number)
        return [number.name for number in core.numbers]

    def add_once(self, core: CoreSource, numbers: Sequence[str]) -> list[str]:
        """Computes what is the same in each step, from lifted tensors that are loaded; returns its names, which are the
        step's last arguments.

        Args:
            numbers: from `add_numbers`.
        """
        if core.once is None:
            return []
        names = [f"{core.once.core.name}_{i}" for i in range(len(core.once.dtypes))]
        if core.once.core in self._once:  # of another step
            return names
        self._once.append(core.once.core)
        for name, dtype in zip(names, core.once.dtypes, strict=True):
            self.assign(name, self.zeros(dtype))
        self.call(names, core.once.core, [*(port.name for port in core.once.core.arguments), *numbers])
        return names

    @abstractmethod
    def number(self, number: Number) -> None:
        """Gives a number its name, a scalar of its dtype, from the integers that hold it (`Number.arguments`)."""

    @abstractmethod
    def _declare(self, port: Port, terms: Sequence[tuple[str, str, str]] | None, *, strided_time: bool) -> None:
        """Notes where an operand's elements are.

        Args:
            terms: `(inner, size, stride)` of each term of the offset in a step, `("", "", stride)` of a run; `None`:
                it is dense.
            strided_time: whether the distance of two steps is the argument ``"<operand>_time"``, or else the number of
                elements of a step.
        """

    # -- places, loads and stores --------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Writes the lines before everything else."""

    @abstractmethod
    def point(self, port: Port, chunks: str = "", length: int = 1) -> None:
        """Lets an operand point to its first step, or to that after `chunks` times `length` of them."""

    @abstractmethod
    def at(self, port: Port, step: int = 0) -> str:
        """The place `step` steps after the one that an operand points to."""

    @abstractmethod
    def row(self, port: Port, number: str, shift: int = 0) -> str:
        """The place of row `number + shift`, from the operand's beginning."""

    @abstractmethod
    def move(self, port: Port, steps: int) -> None:
        """Lets an operand point `steps` further."""

    @abstractmethod
    def load(self, name: str, port: Port, place: str | None = None, exists: str | None = None) -> None:
        """Loads one step.

        Args:
            place: by default the operand's beginning.
            exists: a scalar condition; where it does not hold, zeros are loaded. By default, it does.
        """

    @abstractmethod
    def store(self, port: Port, value: str, place: str | None = None, exists: str | None = None) -> None:
        """Stores one step, or its sum; `place` and `exists` as for `load`."""

    def store_bits(self, port: Port, value: str, place: str, exists: str | None = None) -> None:
        """Stores whether the elements of one step are not 0; those beyond the last one count as 0.

        Raises:
            UnsupportedOpError: the language has no way to do it.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} write no bits.", "bits")

    # -- values --------------------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, dtype: torch.dtype) -> str:
        """The value 0, as text."""

    @abstractmethod
    def assign(self, name: str, text: str, *, flag: bool = False) -> None:
        """Gives a value a name, or a flag: a condition, which is the same for all elements."""

    @abstractmethod
    def select(self, name: str, condition: str, text: str, other: str, *, flag: bool = False) -> None:
        """`text` where a scalar condition holds, else `other`: values, or flags."""

    @abstractmethod
    def accumulate(self, name: str, value: str, dtype: torch.dtype | None = None, condition: str | None = None) -> None:
        """Adds a value to a sum of `dtype`, where a scalar condition holds."""

    @abstractmethod
    def call(self, results: Sequence[str], core: CoreSource, arguments: Sequence[str]) -> None:
        """Computes one step."""

    @abstractmethod
    def flag(self, value: bool) -> str:
        """The value of a flag that is known, as text; of a type that the flag can keep through a loop."""

    # -- control -------------------------------------------------------------------------------------------

    @abstractmethod
    def integer(self, name: str, expression: str) -> None:
        """Gives a scalar whole number a name."""

    @abstractmethod
    def loop(self, variable: str, start: str, end: str, stages: int = 1) -> AbstractContextManager[None]:
        """A loop, whose loads may be issued `stages - 1` rounds ahead."""

    def rows(self) -> AbstractContextManager[None]:
        """A loop over the rows of the step; what is declared in it is declared for that row.

        Raises:
            UnsupportedOpError: the language has no way to do it.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} walk no rows.", "rows")

    def segment(self, first: int = 0) -> None:
        """Names the program's segment of time `segment`, from `first` on.

        The kernel takes the integers ``"SEGMENTS"`` and ``"BESIDE"``, of which the latter counts the segments that run
        side by side; each has programs of its own.

        Raises:
            UnsupportedOpError: the language has no way to do it.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} walk no segments.", "segments")

    def add_segments(self) -> None:
        """Declares the integer ``"SEGMENTS"`` of a kernel that walks all segments one after the other."""
        self._sizes.append("SEGMENTS")

    def add_size(self, name: str) -> None:
        """Declares an integer argument."""
        self._sizes.append(name)

    def differ(self, name: str, value: str, other: str, dtype: torch.dtype) -> None:
        """Names a value of int32: 1 where two values of a dtype differ in any bit, else 0."""
        raise UnsupportedOpError(f"kernels in {self.target.name} compare no bits.", "segments")

    def not_finite(self, name: str, value: str) -> None:
        """Names a value of int32: 1 where a floating-point value is infinite or NaN, else 0."""
        raise UnsupportedOpError(f"kernels in {self.target.name} compare no bits.", "segments")

    def bounds(self, least: str, largest: str, values: Sequence[str]) -> None:
        """Names two scalar whole numbers: the least and the largest of values of int32 at all elements.

        Both are within 0 and `T`.

        Raises:
            UnsupportedOpError: the language has no way to do it.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} reduce no values.", "lengths")

    def less(self, name: str, value: str, number: str) -> None:
        """Names a value of int32, less than `value` by a scalar whole number."""
        raise UnsupportedOpError(f"kernels in {self.target.name} count no steps.", "lengths")

    def whole_steps(self, name: str, value: str, most: int) -> None:
        """Names a whole number for each element, int64: `value`, rounded down, and at least 0 and at most `most`."""
        raise UnsupportedOpError(f"kernels in {self.target.name} load no earlier steps.", "delays")

    def shift(self, port: Port, steps: str) -> None:
        """From here on, places of a declared operand are `steps` steps earlier, a number for each element.

        Loads and stores need a condition: rows before the first one do not exist.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} load no earlier steps.", "delays")

    def choose(self, name: str, number: str, text: str, other: str) -> None:
        """Gives `name` the value `text` at elements where a value of int32 is above 0, else `other`.

        Raises:
            UnsupportedOpError: the language has no way to do it.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} count no steps.", "lengths")

    def any(self, name: str, value: str) -> None:
        """Names a scalar whole number: above 0 if a value of int32 is, at any element."""
        raise UnsupportedOpError(f"kernels in {self.target.name} reduce no values.", "segments")

    @abstractmethod
    def when(self, condition: str) -> AbstractContextManager[None]:
        """A branch that runs if a scalar condition holds."""

    # -- the whole -----------------------------------------------------------------------------------------

    def finish(self, name: str, cores: Sequence[CoreSource], doc: str) -> KernelSource:
        """The kernel, named by what it does."""
        arguments = [f"{port.name}_ptr" for port in self._params] + self._sizes
        body = self._text()
        text = f"({', '.join(arguments)})\n{body}\n{[core.name for core in cores]}"
        called = (*self._once, *cores)

        def kernel(full: str) -> str:
            return self._kernel(full, arguments, body, doc)

        return framed(name, self.target, self._params, self._sizes, called, text, kernel)

    def _text(self) -> str:
        """The lines that were collected."""
        return "\n".join(self._lines)

    @abstractmethod
    def _kernel(self, name: str, arguments: Sequence[str], body: str, doc: str) -> str:
        """The kernel's function around its lines."""
