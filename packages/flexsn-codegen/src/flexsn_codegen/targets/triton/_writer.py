"""Triton kernels in which a program computes `BLOCK` elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._numbers import Number
from flexsn_codegen.source._source import CoreSource, Strided
from flexsn_codegen.targets._base import KernelWriter, Target
from flexsn_codegen.targets.triton._literals import tl_name
from flexsn_graph import Port


def decode(number: Number) -> str:
    """An expression that decodes a number from the kernel's integer arguments, as a scalar of its dtype."""
    dtype, name = number.dtype, tl_name(number.dtype)
    words = [f"tl.cast({argument}, tl.int32)" for argument in number.arguments]
    if dtype.itemsize == 8:
        low, high = words
        bits = f"(({high}.to(tl.int64) << 32) | ({low}.to(tl.int64) & 0xFFFFFFFF))"
        return bits if dtype == torch.int64 else f"{bits}.to({name}, bitcast=True)"
    (bits,) = words
    if dtype == torch.bool:
        return f"{bits} != 0"
    return f"{bits}.to({name}, bitcast=True)" if dtype.itemsize == 4 else f"{bits}.to({name})"


def _fold(function: str, values: Sequence[str]) -> str:
    """An expression that combines several values by nested calls of a function of two arguments."""
    folded, *others = values
    for other in others:
        folded = f"{function}({folded}, {other})"
    return folded


def _mask_text(exists: str | None) -> str:
    return f"mask & ({exists})" if exists else "mask"


class TritonWriter(KernelWriter):
    """Writes kernels in Triton.

    In the source, `off` is the index of an element in the step. `number` is the same index, in 32 bits if they are
    sufficient, because divisions of 32 bits take half the time. `mask` is False for elements beyond the last one of the
    step, `step` is `NCL` in int64, and `<operand>_at` is a scalar pointer to the operand's current time step.
    """

    def __init__(self, target: Target, strided: Strided, sizes: Sequence[str]) -> None:
        super().__init__(target, strided, sizes)
        # An operand without an entry has one number for all elements of the step. This number is loaded once.
        self._offsets: dict[Port, str] = {}
        self._computed: dict[tuple[tuple[str, str, str], ...], str] = {}
        self._times: dict[Port, str] = {}
        self._unspecialised = ["T"] if "T" in sizes else []

    def begin(self) -> None:
        # int64, because offsets may exceed 2**31, for example for T=32, a batch of 64, and 64 x 224 x 224 elements.
        self.line("off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)")
        self.line(f"mask = off < {self._elements}")
        if "T" in self._sizes:
            self.line(f"step = tl.cast({self._elements}, tl.int64)")
            # The line adds 0, but the compiler then assumes that `off` is only as divisible as `step`. Otherwise, if
            # the distance between time steps is not a multiple of 16 bytes, every second or fourth step would be loaded
            # and stored in wider pieces than the other steps. Values would then be moved between threads, which makes
            # Triton 3.6 fail for some kernels ("does not dominate this use").
            self.line(f"off += tl.where(T < 0, {self._elements}, 0)")

    def _declare(self, port: Port, terms: Sequence[tuple[str, str, str]] | None, *, strided_time: bool) -> None:
        self._times[port] = f"tl.cast({port.name}_time, tl.int64)" if strided_time else "step"
        if terms is None:
            self._offsets[port] = "off"
        elif terms and tuple(terms) in self._computed:
            self._offsets[port] = self._computed[tuple(terms)]
        elif terms:
            if not self._computed:
                self.line(f"number = dev.narrow(off, {self._elements})")
            self._offsets[port] = self._computed[tuple(terms)] = f"{port.name}_off"
            if not terms[0][0]:
                self.line(f"{port.name}_off = off * {terms[0][2]}")
                return
            summands = (f"((number // {inner}) % {size}).to(tl.int64) * {stride}" for inner, size, stride in terms)
            self.line(f"{port.name}_off = {' + '.join(summands)}")

    def number(self, number: Number) -> None:
        self._unspecialised += number.arguments
        self.line(f"{number.name} = {decode(number)}")

    def _step_distance(self, port: Port) -> str:
        """Source text of the distance between two time steps, in elements."""
        if port in self._bits:
            return f"tl.cast({self._row}, tl.int64)"
        return "tl.num_programs(0)" if port in self._sums else self._times[port]

    def point(self, port: Port, chunks: str = "", length: int = 1) -> None:
        rows = f" + tl.cast({chunks}, tl.int64) * {length} * {self._step_distance(port)}" if chunks else ""
        self.line(f"{port.name}_at = {port.name}_ptr{rows}")

    def at(self, port: Port, step: int = 0) -> str:
        return f"{port.name}_at" + (f" + {step} * {self._step_distance(port)}" if step else "")

    def row(self, port: Port, number: str, shift: int = 0) -> str:
        row = f"tl.cast({number}, tl.int64)"
        row = f"({row} - {-shift})" if shift else row
        return f"{port.name}_ptr + {row} * {self._step_distance(port)}"

    def move(self, port: Port, steps: int) -> None:
        sign, count = ("-", -steps) if steps < 0 else ("+", steps)
        self.line(f"{port.name}_at {sign}= {count} * {self._step_distance(port)}")

    def load(self, name: str, port: Port, place: str | None = None, exists: str | None = None) -> None:
        pointer = place or f"{port.name}_ptr"
        if port in self._offsets:
            self.line(f"{name} = dev.load({pointer} + {self._offsets[port]}, {_mask_text(exists)})")
        else:
            self.line(f"{name} = tl.broadcast_to(dev.load({pointer}, {exists or True}), [BLOCK])")

    def store(self, port: Port, value: str, place: str | None = None, exists: str | None = None) -> None:
        pointer = place or f"{port.name}_ptr"
        if port in self._sums:
            total = f"tl.sum(tl.where(mask, {value}, 0), axis=0)"
            self.line(f"tl.store({pointer} + tl.program_id(0), {total}, {exists or True})")
        else:
            self.line(f"dev.store({pointer} + {self._offsets[port]}, {value}, {_mask_text(exists)})")

    def store_bits(self, port: Port, value: str, place: str, exists: str | None = None) -> None:
        store = f"dev.store_bits({place}, {value}, mask, {self._row})"
        if exists is None:
            self.line(store)
        else:
            with self.when(exists):
                self.line(store)

    def zeros(self, dtype: torch.dtype) -> str:
        return f"tl.zeros([BLOCK], {tl_name(register_dtype(dtype))})"

    def assign(self, name: str, text: str, *, flag: bool = False) -> None:
        self.line(f"{name} = {text}")

    def select(self, name: str, condition: str, text: str, other: str, *, flag: bool = False) -> None:
        self.line(f"{name} = tl.where({condition}, {text}, {other})")

    def accumulate(self, name: str, value: str, dtype: torch.dtype | None = None, condition: str | None = None) -> None:
        term = value if dtype is None else f"{value}.to({tl_name(register_dtype(dtype))})"
        self.line(f"{name} += " + (term if condition is None else f"tl.where({condition}, {term}, 0)"))

    def call(self, results: Sequence[str], core: CoreSource, arguments: Sequence[str]) -> None:
        self.line(f"{', '.join(results)} = {core.name}({', '.join(arguments)})")

    def flag(self, value: bool) -> str:
        # If no loop changes the flag, the compiler evaluates this constant, and removes the condition of the step.
        return f"tl.full([], {value}, tl.int1)"

    def integer(self, name: str, expression: str) -> None:
        self.line(f"{name} = {expression}")

    def loop(self, variable: str, start: str, end: str, stages: int = 1) -> AbstractContextManager[None]:
        rounds = f"tl.range({start}, {end}, num_stages={stages})" if stages > 1 else f"range({start}, {end})"
        return self._block(f"for {variable} in {rounds}:")

    def when(self, condition: str) -> AbstractContextManager[None]:
        return self._block(f"if {condition}:")

    def segment(self, first: int = 0) -> None:
        self._sizes += ["SEGMENTS", "BESIDE"]
        self._unspecialised += ["SEGMENTS", "BESIDE"]
        # int64, because products of `segment` and a number of steps exceed 2**31.
        self.line("segment = tl.program_id(1).to(tl.int64)" + (f" + {first}" if first else ""))

    def add_segments(self) -> None:
        super().add_segments()
        self._unspecialised.append("SEGMENTS")

    def add_size(self, name: str) -> None:
        super().add_size(name)
        self._unspecialised.append(name)

    def differ(self, name: str, value: str, other: str, dtype: torch.dtype) -> None:
        dtype_in_registers = register_dtype(dtype)
        if dtype_in_registers.is_floating_point:
            bits = f"tl.int{8 * dtype_in_registers.itemsize}"
            value, other = f"{value}.to({bits}, bitcast=True)", f"{other}.to({bits}, bitcast=True)"
        self.line(f"{name} = (({value} != {other}) & mask).to(tl.int32)")

    def not_finite(self, name: str, value: str) -> None:
        self.line(f"{name} = (({value} - {value} != 0) & mask).to(tl.int32)")

    def bounds(self, least: str, largest: str, values: Sequence[str]) -> None:
        inside = [f"tl.minimum(tl.maximum({value}, 0), T)" for value in values]
        lows = [f"tl.min(tl.where(mask, {one}, T), axis=0)" for one in inside]
        highs = [f"tl.max(tl.where(mask, {one}, 0), axis=0)" for one in inside]
        self.line(f"{largest} = {_fold('tl.maximum', highs)}")
        # In a row that does not exist, the mask excludes all elements, so the minimum is T. Both bounds are then 0.
        self.line(f"{least} = {_fold('tl.minimum', [*lows, largest])}")

    def less(self, name: str, value: str, number: str) -> None:
        self.line(f"{name} = {value} - tl.cast({number}, tl.int32)")

    def whole_steps(self, name: str, value: str, most: int) -> None:
        self.line(f"{name} = tl.minimum(tl.maximum(tl.floor({value}), 0), {most}).to(tl.int64)")

    def shift(self, port: Port, steps: str) -> None:
        before = self._offsets.get(port, "0")
        self.line(f"{port.name}_shifted = {before} - {steps} * {self._step_distance(port)}")
        self._offsets[port] = f"{port.name}_shifted"

    def choose(self, name: str, number: str, text: str, other: str) -> None:
        self.line(f"{name} = tl.where({number} > 0, {text}, {other})")

    def any(self, name: str, value: str) -> None:
        self.line(f"{name} = tl.max({value}, axis=0)")

    @contextmanager
    def rows(self) -> Iterator[None]:
        self._sizes += ["ROWS", "ROW"]
        self._unspecialised.append("ROWS")
        self.line("first = off")
        self.line("within = first < ROW")
        with self._block("for row in range(0, ROWS):"):
            self.line("off = first + row * tl.cast(ROW, tl.int64)")
            self.line(f"mask = within & (off < {self._elements})")
            self._computed.clear()  # offsets that were computed before the loop are those of the first row
            yield
        self.line("off = first")
        self.line("mask = within")

    @contextmanager
    def _block(self, header: str) -> Iterator[None]:
        self.line(header)
        before = len(self._lines)
        with self.indented():
            yield
            if len(self._lines) == before:
                self.line("pass")

    def _kernel(self, name: str, arguments: Sequence[str], body: str, doc: str) -> str:
        return jit_function(name, arguments, self._unspecialised, body, doc)


def jit_function(name: str, arguments: Sequence[str], unspecialised: Iterable[str], body: str, doc: str) -> str:
    """The source of a kernel's function for blocks of `BLOCK` elements, with `body` as its lines.

    Args:
        unspecialised: arguments for whose values Triton compiles no specialized binaries, such as T.
    """
    signature = ",\n    ".join([*arguments, "BLOCK: tl.constexpr"])
    names = ", ".join(f'"{name}"' for name in unspecialised)
    options = f"(do_not_specialize=[{names}])" if names else ""
    return f'@triton.jit{options}\ndef {name}(\n    {signature},\n):\n    """{doc}"""\n{body}\n'
