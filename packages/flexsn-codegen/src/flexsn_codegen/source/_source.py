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
# A number `n`: element `off` is at the sum of `n` terms, `Σ_i (off // inner_i % size_i) * stride_i`. The numbers in the
# terms are arguments of the kernel. With 0 terms, the operand is one value for the whole step.
# `RUN`: element `off` is at `off * stride`.
StepLayout = int
DENSE: StepLayout = -1
RUN: StepLayout = -2


class Like(NamedTuple):
    """The layout of an operand with the same offsets as an earlier operand. The kernel computes these offsets once.

    Attributes:
        operand: the number of the earlier operand.
    """

    operand: int


class Late(NamedTuple):
    """Delays of an input: a number for each element of the step.

    Attributes:
        by: number of the input that contains the delays, in floating point, as one step. The value at step `t` is the
            value of step `t - floor(delay)`, and 0 before the first step.
        most: the largest number of steps. Larger delays are treated as this number, and negative ones as 0.
    """

    by: int
    most: int


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout of a sequence.

    Attributes:
        step: layout within a step.
        strided_time: True if the stride of time is an argument, False if it is `NCL`.
        counts_down: memory contains one step, int32. The value at step `t` is that number minus `t`. Only its sign
            matters: kernels may replace any value above 0 with 1.
        early: True if the input is loaded into registers one chunk before its use while chunks are in flight. The GPU
            cannot copy single bytes ahead, so a program would otherwise have to wait for the load.
        late: delays of the input, or `None` if the value at step `t` is that of step `t`.
        once: True if memory contains one step, to which the `late` of other inputs refers.
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
        source: the text of the function, without imports.
        arguments: the arguments, in order.
        results: the results, in order.
        target: the target of the source.
        numbers: numbers that follow the arguments. The name and the source do not depend on their values.
        once: the last arguments, which are equal in each step, or `None` if there are none.
        stages: the stages of a function that reduces rows. Their functions are in `source`, and none of these functions
            is called `name`.
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
        """The integer arguments of the kernel that represent the function's numbers, by name."""
        return {name: integer for number in self.numbers for name, integer in number.integers.items()}


@dataclass(frozen=True, slots=True)
class RowStage:
    """A stage of a function on rows. Its results are reduced or written.

    Attributes:
        core: the function of one element. Its arguments of role `LIFTED` are results of earlier reductions, numbered
            over all stages.
        reductions: for each result, the op that reduces it and the dtype of the reduction. Empty if the results are
            written.
        written: for each result of the stage, the corresponding result of the whole function.
        whole: True if the results have one element for each element of a row, False if they have one for the row.
        dtypes: dtypes of the results.
        again: numbers of results that are written twice, as the last entries of `written`.
        kept: the last results, which later stages read at each element of the row, and their dtypes.
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
        """For each entry of `written`, the number of the core's result."""
        return (*range(len(self.core.results)), *self.again)


@dataclass(frozen=True, slots=True)
class Once:
    """Arguments of a step that are equal in each step and computed before the loop over time.

    Attributes:
        core: the function that computes these arguments from lifted tensors and the step's numbers.
        dtypes: dtypes of its results.
    """

    core: CoreSource
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's source, and the arguments with which the kernel is called.

    Attributes:
        name, source: name and text of the kernel's function. The text is a separate module.
        params: tensor arguments, which come first.
        sizes: integer arguments, which come next: ``"T"``, ``"NCL"``, then per strided operand
            ``"<operand>_time"`` and ``"<operand>_inner<i>"``, ``"<operand>_size<i>"``,
            ``"<operand>_stride<i>"``, then ``"ROWS"`` and ``"ROW"`` if the kernel walks rows, then the integers of the
            step's numbers (`CoreSource.integers`). In Triton, the last argument is the constexpr `BLOCK`, elements per
            program.
        target: the target of the source.
    """

    name: str
    source: str
    params: tuple[Port, ...]
    sizes: tuple[str, ...]
    target: Target


_MAX_NAME = 80


def identifier(text: str, limit: int | None = _MAX_NAME, reserved: Collection[str] = ()) -> str:
    """`text` as an identifier of limited length, because the identifier also becomes a file name.

    Args:
        reserved: names that already have another meaning.
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
        name: start of the kernel's name. A digest of `content` follows.
        params, sizes: see `KernelSource`.
        cores: the functions that the kernel calls, in order.
        content: everything that distinguishes the kernel from other kernels.
        kernel: a function that maps the whole name to the text of the kernel's function.
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    full = f"{identifier(name, reserved=target.reserved)}_{digest}"
    functions = "\n\n".join(core.source for core in cores)
    source = f"{target.header}\n\n{functions}\n\n{kernel(full)}"
    return KernelSource(full, source, tuple(params), tuple(sizes), target)
