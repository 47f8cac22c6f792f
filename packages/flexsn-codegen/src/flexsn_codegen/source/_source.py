"""Generated sources: the function of one step, a kernel around it, and the positions of the operands' elements."""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexsn_codegen._torch_private_ops import OpOverload
from flexsn_codegen.source._numbers import Number
from flexsn_graph import Port

if TYPE_CHECKING:
    from flexsn_codegen.targets import Target

# The layout of an operand over a step of `NCL` elements. `DENSE`: element `off` is at offset `off`.
# A number `n`: element `off` is at the sum of `n` terms, `Σ_i (off // inner_i % size_i) * stride_i`, whose numbers are
# arguments of the kernel; with 0 terms, the operand is one value for the whole step.
# `RUN`: element `off` is at `off * stride`.
StepLayout = int
DENSE: StepLayout = -1
RUN: StepLayout = -2


class Like(NamedTuple):
    """The layout of an operand with the same offsets as an earlier operand; the kernel computes them once.

    Attributes:
        operand: the number of the earlier operand.
    """

    operand: int


class Late(NamedTuple):
    """Delays of an input: a number for each element of the step.

    Attributes:
        by: number of the input that holds the delays, in floating point, as one step. The value at step `t` is that of
            step `t - floor(delay)`, and 0 before the first step.
        most: the largest number of steps; larger delays count as this number, and negative ones as 0.
    """

    by: int
    most: int


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Layout of a sequence.

    Attributes:
        step: layout within a step.
        strided_time: True if the stride of time is an argument, False if it is `NCL`.
        counts_down: memory holds one step, int32, and the value at step `t` is less than that by `t`. Only its sign
            matters: kernels may replace any value above 0 by 1.
        early: with chunks in flight, the input is loaded into registers a chunk before its use. The GPU cannot copy
            single bytes ahead, so a program would have to wait for their load.
        late: its delays; `None` if the value at step `t` is that of step `t`.
        once: memory holds one step, which `late` of other inputs refers to.
    """

    step: StepLayout = DENSE
    strided_time: bool = False
    counts_down: bool = False
    early: bool = False
    late: Late | None = None
    once: bool = False


Strided = tuple[tuple[Port, InputLayout], ...]
"""Layouts of tensors that are not dense in the order in which the kernel counts elements."""


@dataclass(frozen=True, slots=True)
class CoreSource:
    """The function that computes one step.

    Attributes:
        name: the function's name.
        source: its text, without the imports.
        arguments: its arguments, in order.
        results: its results, in order.
        target: the target of the source.
        numbers: its numbers, which follow the arguments. The name and the source do not depend on their values.
        once: its last arguments, which are equal in each step; `None` if there are none.
        stages: for a function that reduces rows, its parts. Their functions are in `source`; `name` is none of them.
    """

    name: str
    source: str
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    target: Target
    numbers: tuple[Number, ...] = ()
    once: Once | None = None
    stages: tuple[RowStage, ...] = ()

    @property
    def integers(self) -> dict[str, int]:
        """By name, the integer arguments of the kernel that hold the function's numbers."""
        return {name: integer for number in self.numbers for name, integer in number.integers.items()}


@dataclass(frozen=True, slots=True)
class RowStage:
    """A part of a function on rows: its results are reduced, or written.

    Attributes:
        core: the function of one element. Of role `LIFTED` it takes what earlier stages reduced, counted over all.
        reductions: of each of its results, by which op and as which dtype; none: they are written.
        written: which results of the whole function its results are.
        whole: they have an element for each of a row; else there is one for the row.
        dtypes: of its results.
        again: numbers of results that are written twice, as the last of `written`.
        kept: its last results, which later stages read at each element of the row, and their dtypes.
    """

    core: CoreSource
    reductions: tuple[tuple[OpOverload, torch.dtype], ...] = ()
    written: tuple[Port, ...] = ()
    whole: bool = True
    dtypes: tuple[torch.dtype, ...] = ()
    again: tuple[int, ...] = ()
    kept: tuple[tuple[Port, torch.dtype], ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """For each of `written`, the number of the core's result."""
        return (*range(len(self.core.results)), *self.again)


@dataclass(frozen=True, slots=True)
class Once:
    """Arguments of a step that are equal in each step and are computed before the loop over time.

    Attributes:
        core: the function that computes them from lifted tensors and the step's numbers.
        dtypes: dtypes of its results.
    """

    core: CoreSource
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's source and how it is called.

    Attributes:
        name, source: name and text of the kernel's function, in a module of its own.
        params: its tensor arguments, which come first.
        sizes: its integer arguments, which come next: ``"T"``, ``"NCL"``, then per strided operand
            ``"<operand>_time"`` and ``"<operand>_inner<i>"``, ``"<operand>_size<i>"``,
            ``"<operand>_stride<i>"``; ``"ROWS"`` and ``"ROW"`` if it walks rows; and those of the step's numbers
            (`CoreSource.integers`). In Triton, the last argument is the constexpr `BLOCK`, elements per program.
        target: the target of the source.
    """

    name: str
    source: str
    params: tuple[Port, ...]
    sizes: tuple[str, ...]
    target: Target


_MAX_NAME = 80


def identifier(text: str, limit: int | None = _MAX_NAME, reserved: Collection[str] = ()) -> str:
    """`text` as an identifier of limited length, because it also becomes a file name.

    Args:
        reserved: names with another meaning.
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)[:limit] or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) or name in reserved else name


def framed(
    name: str,
    target: Target,
    params: Iterable[Port],
    sizes: Iterable[str],
    cores: Iterable[CoreSource],
    content: str,
    kernel: Callable[[str], str],
) -> KernelSource:
    """The source of a kernel.

    Args:
        name: the beginning of the kernel's name; a digest of `content` is the rest.
        params, sizes: as in `KernelSource`.
        cores: the functions that the kernel calls, in order.
        content: everything that distinguishes the kernel from others.
        kernel: function that maps the whole name to the text of the kernel's function.
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    full = f"{identifier(name, reserved=target.reserved)}_{digest}"
    functions = "\n\n".join(core.source for core in cores)
    source = f"{target.header}\n\n{functions}\n\n{kernel(full)}"
    return KernelSource(full, source, tuple(params), tuple(sizes), target)
