"""The interface of a target: names of dtypes, literals, a rule for each op, functions, loads and stores, and loops.

The templates of scans (`flexsn_codegen.scan`) and of pointwise kernels (`Target.pointwise`, which a target may replace)
are written once, for any `KernelWriter`. They pass scalar integer expressions to the writer in Python's syntax, with
the operators ``+ - * // % > >= < ==``, and with ``&`` between comparisons. No operand of `//` and `%` is negative, so
these two operators have the same results in all languages.
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
"""Bits per word. The bits of one step fill whole words, and so do the bits that one program writes."""


class Approximate(Enum):
    """Operations that may be computed approximately."""

    NOTHING = auto()
    DIVISION = auto()  # with an error of up to 2 ulp
    EVERYTHING = auto()


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op, in the form in which the op's rule receives it.

    Attributes:
        op: the op.
        operands: the source text of each argument that is a tensor or a number, in order.
        constants: for each operand, its value if the operand is a number in the source. `None` for tensors, and for
            numbers that are arguments of the kernel.
        dtype: dtype of the tensor operands. If no operand is a tensor, dtype of the result.
        result: dtype of the result.
        target: the target of the source.
        index: index of the required result if the op has several results.
        keywords: keyword arguments, and arguments that are neither tensors nor numbers, by name.
        computed: a callable for each operand that is a number and an argument of the kernel, by position. The callable
            receives a function, and returns the source text of the function's value for this number.
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
        """True if an operand is a single number for all elements."""
        return self.constants[position] is not None or position in self.computed

    def number_of(self, position: int, function: Callable[[float], float]) -> str:
        """Source text of `function`, applied in float64 to an operand that is a number.

        The text is a literal or an argument of the kernel.
        """
        constant = self.constants[position]
        return self.computed[position](function) if constant is None else self.number(function(constant))

    def refuse(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"{self.op} on {self.dtype}: {why}", str(self.op))


Rule = Callable[[OpCall], str]


@dataclass(frozen=True, slots=True)
class Statement:
    """Assigns `text` to `name`. `citation` is the user's line that the statement computes, or empty."""

    name: str
    text: str
    citation: str = ""


class Summed(Enum):
    """Dimension over which a kernel on rows and columns sums a result."""

    NOT = auto()  # the result is not summed
    OVER_ROWS = auto()  # each program computes one sum for each column, over the program's rows
    OVER_COLUMNS = auto()  # one sum for each row, over all columns


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """The programs of one launch of a kernel on rows and columns.

    Attributes:
        columns: number of columns of a program, padded to a power of two on a GPU.
        programs: number of programs that share the rows. Each of these programs has its own sums over rows.
        beside: number of programs that share the columns of a row.
        steps: number of iterations of a program that sums over rows. In an iteration, the program adds a block of
            rows on a GPU, and one row in C++.
        block, warps: on a GPU, number of elements of a block, and number of warps of a program.
    """

    columns: int
    programs: int
    beside: int = 1
    steps: int = 1
    block: int = 1
    warps: int = 1


class Target(ABC):
    """A language in which kernels are written.

    Half values are float32 in registers, and are rounded where eager mode rounds. In memory, they have their own dtype.

    Attributes:
        name: name of the language, for messages.
        reserved: names with a meaning in generated sources.
        header: the first lines of every module of generated source.
        once: True if values that are the same in every step have to be computed before the loop over time, because the
            language's compiler does not move their computation out of the loop.
        rows: True if programs can walk the rows of a step.
        segments: True if programs can walk segments of time in parallel.
        reduces_rows: True if there are kernels on rows and columns (`row_kernel`).
        weaves: True if there are kernels that write interleaved results (`woven_kernel`).
        keeps_rows: True if kernels on rows keep values of a row from one stage to a later stage.
        columns_in_runs: True if kernels on rows require columns that are evenly spaced in each operand's memory.
        most_columns: the largest number of columns over which kernels on rows sum results (`Summed.OVER_COLUMNS`).
        rules: the rule of each op, which returns the source text of a call.
    """

    name: str
    reserved: Collection[str] = ()
    header: str = ""
    once: bool = False
    rows: bool = False
    segments: bool = False
    reduces_rows: bool = False
    weaves: bool = False
    keeps_rows: bool = False
    columns_in_runs: bool = False
    most_columns: int = sys.maxsize

    def __init__(self) -> None:
        self.rules: dict[Op, Rule] = {}

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """True if the language has values of this dtype."""

    @abstractmethod
    def literal(self, value: bool | int | float, dtype: torch.dtype) -> str:
        """The source text of a number, with the type that values of `dtype` have in registers."""

    @abstractmethod
    def rounded(self, text: str, dtype: torch.dtype) -> str:
        """The source text of a value, rounded to `dtype` if this dtype is narrower than the dtype in registers."""

    @abstractmethod
    def filled(self, number: str, like: str) -> str:
        """The source text of a value that has the shape of `like` and the same number in each element."""

    @abstractmethod
    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        """The source of the function that computes one step."""

    @abstractmethod
    def writer(self, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        """A writer that collects the lines of one kernel."""

    @abstractmethod
    def compile(self, source: KernelSource) -> Any:
        """Creates the object that launches the kernel of this source."""

    def walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        """Layouts of a pointwise kernel's operands, and the integers that complete the layouts.

        The kernel's source depends on the layouts, but not on the integers. The integers are arguments of the kernel,
        after the number of elements.

        Args:
            sizes: sizes of the dimensions, outermost first, without dimensions of one element.
            strides: strides of each operand.
        """
        return by_terms(sizes, strides)

    def plain_walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        """Like `walk`, but returns only layouts that standalone files support."""
        return self.walk(sizes, strides)

    def pointwise(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        """The kernel `(*used inputs, *results, N, *numbers of the layouts, *numbers)` of a function of one element.

        Args:
            name: start of the kernel's name.
            layouts: layouts of the inputs and of the results, in this order, returned by `walk`.
            may_overlap: True if an input may overlap the memory of a result.
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
        """Like `pointwise`, for interleaved results. `N` is the number of elements of all results in a group.

        Args:
            layouts: layouts of the inputs, and of the first result in each group of `count` results, returned by
                `walk`.
            count: number of results in a group. The elements of these results that have the same index are adjacent in
                memory.
        """
        raise NotImplementedError

    def row_launch(self, core: CoreSource, count: int, width: int, *, reduces: bool, sums: bool) -> RowLaunch:
        """The programs with which a kernel on rows and columns is launched.

        Args:
            core: the function that the kernel computes.
            count, width: number of rows, and number of columns.
            reduces: True if the function reduces rows.
            sums: True if some of the function's results are summed over rows.

        Raises:
            UnsupportedOpError: the rows are too long to be reduced.
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
        """Like `walk`, for a kernel on rows and columns. Dimensions of one element are allowed.

        Args:
            split: number of dimensions that form the rows. The other dimensions form the columns.
            launch: result of `row_launch`.
            sums: for each operand, the dimension over which it is summed. The memory of an operand with `OVER_ROWS` is
                dense, and has one sum for each program and column.
            after: for each operand, the index of an earlier operand with which it is interleaved, or `None`. In
                memory, each element of the earlier operand is just before the corresponding element of this operand.
        """
        raise NotImplementedError

    def row_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        """Like `pointwise`, for a function with stages. `N` is the number of rows.

        Args:
            layouts: layouts returned by `walk_rows`.
        """
        raise NotImplementedError

    def approximated(self, text: str, approximate: Approximate) -> str:
        """The source text of an op with approximate functions, as far as `approximate` allows. By default, `text`."""
        return text

    def expression(self, call: OpCall, *, rounded: bool = True, approximate: Approximate = Approximate.NOTHING) -> str:
        """The source text of an op.

        Args:
            rounded: True to round the result to its dtype, as eager mode does after each op.
        """
        rule, facts = self.rules.get(call.op), facts_of(call.op)
        if rule is None or facts is None:
            raise UnsupportedOpError(
                f"{call.op} has no rule. Write it in terms of other ops, or add a rule with "
                "flexsn_codegen.register_op.",
                str(call.op),
            )
        text = self.approximated(rule(call), approximate)
        return self.rounded(text, call.result) if rounded and not facts.exact else text


class KernelWriter(ABC):
    """Collects the arguments and lines of one kernel.

    A value is a name in the source for all elements of a step that one program computes. A place is the source text of
    the address at which a step of an operand starts. For some operands, the elements of a step are summed, and each
    program writes one number.

    Args:
        target: the target of the kernel.
        strided: layouts of operands that are not dense. They replace the layouts that `add` receives.
        sizes: names of the first integer arguments. The last of these arguments is the number of elements of a step.

    Attributes:
        branches: True if a branch is the fastest way to skip steps that do not exist. False if masks are faster.
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
        """Adds a line of text in the target's language."""
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
        """Declares a tensor argument and the offsets of its elements within a step.

        Args:
            like: an earlier operand with the same layout, sizes and strides.
        """
        port = Port(role, index)
        strided = self._strided.get(port)
        if strided is not None:
            layout, strided_time = strided.step, strided.strided_time
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
            inner, size, stride = (f"{(like or port).name}_{field}{i}" for field in ("inner", "size", "stride"))
            if like is None:
                self._sizes += [inner, size, stride]
            terms.append((inner, size, stride))
        self._declare(port, None if layout == DENSE else terms, strided_time=strided_time)
        return port

    def add_operands(self, ports: Sequence[Port], layouts: Sequence[StepLayout | Like]) -> Sequence[Port]:
        """Declares operands with layouts from `Target.walk`. Returns their ports."""
        for port, layout in zip(ports, layouts, strict=True):
            if isinstance(layout, Like):
                shared_layout = layouts[layout.operand]
                assert not isinstance(shared_layout, Like)
                self.add(port.role, port.index, shared_layout, like=ports[layout.operand])
            else:
                self.add(port.role, port.index, layout)
        return ports

    def add_inputs(self, layouts: Sequence[InputLayout], used: Collection[Port]) -> dict[int, Port]:
        """Declares the inputs that are among the arguments `used`. Returns their ports by index."""
        return {
            i: self.add(Role.INPUT, i, layout.step, strided_time=layout.strided_time)
            for i, layout in enumerate(layouts)
            if Port(Role.INPUT, i) in used
        }

    def add_lifted(
        self, layouts: Sequence[StepLayout], used: Collection[Port], like: Sequence[int] = ()
    ) -> dict[int, Port]:
        """Declares the lifted tensors that are among the arguments `used`. Returns their ports by index.

        Args:
            like: see `ForwardSpec.lifted_like`.
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
        """Declares the tensors of one role that are present. Returns their ports by index.

        Args:
            summed: for each tensor, True if each program writes one sum per step. Empty if no tensor is summed.
        """
        ports = {i: self.add(role, i) for i, is_present in enumerate(present) if is_present}
        self._sums |= {port for i, port in ports.items() if summed and summed[i]}
        return ports

    def add_bits(self, present: Sequence[bool]) -> dict[int, Port]:
        """Declares the bits of outputs. Returns their ports by the index of the output.

        Each byte contains the bits of 8 elements, and the bytes of a step fill whole words of `WORD` bits.
        """
        ports = {i: Port(Role.BITS, i) for i, is_present in enumerate(present) if is_present}
        self._bits |= set(ports.values())
        for port in ports.values():
            self.add(port.role, port.index)
        return ports

    @property
    def _row(self) -> str:
        """Source text of the number of bytes that contain the bits of one step."""
        return f"({self._elements} + {WORD - 1}) // {WORD} * {WORD // 8}"

    def add_numbers(self, core: CoreSource) -> list[str]:
        """Declares the numbers that a step takes as arguments after the tensors. Returns the names of the numbers."""
        for number in core.numbers:
            self._sizes += number.arguments
            self.number(number)
        return [number.name for number in core.numbers]

    def add_once(self, core: CoreSource, numbers: Sequence[str]) -> list[str]:
        """Computes the values that are the same in every step, from lifted tensors that are already loaded.

        Returns the names of these values, which are the last arguments of the step.

        Args:
            numbers: result of `add_numbers`.
        """
        if core.once is None:
            return []
        names = [f"{core.once.core.name}_{i}" for i in range(len(core.once.dtypes))]
        if core.once.core in self._once:  # another step has already computed the values
            return names
        self._once.append(core.once.core)
        for name, dtype in zip(names, core.once.dtypes, strict=True):
            self.assign(name, self.zeros(dtype))
        self.call(names, core.once.core, [*(port.name for port in core.once.core.arguments), *numbers])
        return names

    @abstractmethod
    def number(self, number: Number) -> None:
        """Decodes a number from the integer arguments that contain its bits, and assigns the number to its name."""

    @abstractmethod
    def _declare(self, port: Port, terms: Sequence[tuple[str, str, str]] | None, *, strided_time: bool) -> None:
        """Records the positions of an operand's elements.

        Args:
            terms: `(inner, size, stride)` of each term of the offset in a step, or `("", "", stride)` for the layout
                `RUN`. `None` if the operand is dense.
            strided_time: True if the distance between two steps is the argument ``"<operand>_time"``. False if this
                distance is the number of elements of a step.
        """

    # -- places, loads and stores --------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Writes the first lines of the kernel."""

    @abstractmethod
    def point(self, port: Port, chunks: str = "", length: int = 1) -> None:
        """Makes an operand point to its first step, or to the step `chunks` times `length` if `chunks` is not empty."""

    @abstractmethod
    def at(self, port: Port, step: int = 0) -> str:
        """The place `step` steps after the step to which an operand points."""

    @abstractmethod
    def row(self, port: Port, number: str, shift: int = 0) -> str:
        """The place of row `number + shift`. The rows of an operand are its steps in memory, counted from 0."""

    @abstractmethod
    def move(self, port: Port, steps: int) -> None:
        """Makes an operand point to a step that is `steps` steps later, or earlier if `steps` is negative."""

    @abstractmethod
    def load(self, name: str, port: Port, place: str | None = None, exists: str | None = None) -> None:
        """Loads one step of an operand.

        Args:
            place: the place of the step. By default, the place of the operand's first step.
            exists: a condition: a scalar, or for an operand with shifted loads (`shift`) a condition for each element.
                Where the condition is false, zeros are loaded. By default, it is true.
        """

    @abstractmethod
    def store(self, port: Port, value: str, place: str | None = None, exists: str | None = None) -> None:
        """Stores one step of an operand, or the sum of the step's elements for an operand that is summed.

        Args:
            place, exists: see `load`. Where the condition is false, nothing is stored.
        """

    def store_bits(self, port: Port, value: str, place: str, exists: str | None = None) -> None:
        """Stores a bit for each element of one step: 1 if the element is not 0. Elements beyond the last are 0.

        Raises:
            UnsupportedOpError: kernels in this language cannot write bits.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot write bits.", "bits")

    # -- values --------------------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, dtype: torch.dtype) -> str:
        """The source text of a value whose elements are 0."""

    @abstractmethod
    def assign(self, name: str, text: str, *, flag: bool = False) -> None:
        """Assigns a value to a name. If `flag` is True, the value is a condition that is the same for all elements."""

    @abstractmethod
    def select(self, name: str, condition: str, text: str, other: str, *, flag: bool = False) -> None:
        """Assigns `text` if a scalar condition is true, otherwise `other`. `text` and `other` are values, or flags."""

    @abstractmethod
    def accumulate(self, name: str, value: str, dtype: torch.dtype | None = None, condition: str | None = None) -> None:
        """Adds a value to the sum `name`.

        Args:
            dtype: the dtype to which the value is first converted. `None` for no conversion.
            condition: a scalar condition. If it is false, nothing is added. `None` to add the value in any case.
        """

    @abstractmethod
    def call(self, results: Sequence[str], core: CoreSource, arguments: Sequence[str]) -> None:
        """Computes one step, and assigns its results to names."""

    @abstractmethod
    def flag(self, value: bool) -> str:
        """The source text of a constant flag. Its type is that of flags that change in a loop."""

    # -- control -------------------------------------------------------------------------------------------

    @abstractmethod
    def integer(self, name: str, expression: str) -> None:
        """Assigns a scalar integer to a name."""

    @abstractmethod
    def loop(self, variable: str, start: str, end: str, stages: int = 1) -> AbstractContextManager[None]:
        """A loop whose loads may be issued `stages - 1` iterations ahead."""

    def rows(self) -> AbstractContextManager[None]:
        """A loop over the rows of the step. An operand that is declared inside of the loop is declared for one row.

        Raises:
            UnsupportedOpError: kernels in this language cannot walk rows.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot walk rows.", "rows")

    def segment(self, first: int = 0) -> None:
        """Assigns the number of the program's segment of time, counted from `first`, to `segment`.

        The kernel receives the integer arguments ``"SEGMENTS"`` and ``"BESIDE"``. ``"BESIDE"`` is the number of
        segments that run in parallel. Each of these segments has its own programs.

        Raises:
            UnsupportedOpError: kernels in this language cannot walk segments.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot walk segments.", "segments")

    def add_segments(self) -> None:
        """Declares the integer argument ``"SEGMENTS"`` of a kernel that walks all segments one after the other."""
        self._sizes.append("SEGMENTS")

    def add_size(self, name: str) -> None:
        """Declares an integer argument."""
        self._sizes.append(name)

    def differ(self, name: str, value: str, other: str, dtype: torch.dtype) -> None:
        """Assigns an int32 value: 1 if two values of a dtype differ in any bit, otherwise 0."""
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot compare bits.", "segments")

    def not_finite(self, name: str, value: str) -> None:
        """Assigns an int32 value: 1 if a floating-point value is infinite or NaN, otherwise 0."""
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot compare bits.", "segments")

    def bounds(self, least: str, largest: str, values: Sequence[str]) -> None:
        """Assigns two scalar integers: the smallest and the largest element of some int32 values.

        Both integers are clamped to [0, `T`].

        Raises:
            UnsupportedOpError: kernels in this language cannot reduce values.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot reduce values.", "lengths")

    def less(self, name: str, value: str, number: str) -> None:
        """Assigns the int32 value `value` minus a scalar integer."""
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot count steps.", "lengths")

    def whole_steps(self, name: str, value: str, most: int) -> None:
        """Assigns an int64 value: `value`, rounded down and clamped to [0, `most`]."""
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot load earlier steps.", "delays")

    def shift(self, port: Port, steps: str) -> None:
        """Shifts all later loads and stores of a declared operand back by `steps` steps, an int64 value.

        These loads and stores need a condition, because no row exists before the first row.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot load earlier steps.", "delays")

    def choose(self, name: str, number: str, text: str, other: str) -> None:
        """Assigns `text` to `name` at elements where an int32 value is above 0, and `other` at all other elements.

        Raises:
            UnsupportedOpError: kernels in this language cannot count steps.
        """
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot count steps.", "lengths")

    def any(self, name: str, value: str) -> None:
        """Assigns a scalar integer that is above 0 if an int32 value is above 0 at any element."""
        raise UnsupportedOpError(f"kernels in {self.target.name} cannot reduce values.", "segments")

    @abstractmethod
    def when(self, condition: str) -> AbstractContextManager[None]:
        """A branch that runs if a scalar condition is true."""

    # -- the kernel ----------------------------------------------------------------------------------------

    def finish(self, name: str, cores: Sequence[CoreSource], doc: str) -> KernelSource:
        """The source of the kernel. The kernel's name ends with a digest of the kernel's text."""
        arguments = [f"{port.name}_ptr" for port in self._params] + self._sizes
        body = self._text()
        text = f"({', '.join(arguments)})\n{body}\n{[core.name for core in cores]}"
        called = (*self._once, *cores)

        def kernel(full: str) -> str:
            return self._kernel(full, arguments, body, doc)

        return framed(name, self.target, self._params, self._sizes, called, text, kernel)

    def _text(self) -> str:
        """The collected lines as one text."""
        return "\n".join(self._lines)

    @abstractmethod
    def _kernel(self, name: str, arguments: Sequence[str], body: str, doc: str) -> str:
        """The source of the kernel's function, with `body` as its lines."""
