"""Generated sources: the function of one step, the kernel that calls it, and the layouts of the kernel's operands."""

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
# `RUN`: element `off` is at offset `off * stride`.
# `n`, a number of terms: element `off` is at offset `Σ_i (off // inner_i % size_i) * stride_i`, a sum of `n` terms. The
# integers in the terms are arguments of the kernel. With 0 terms, the operand is one number for the whole step.
StepLayout = int
DENSE: StepLayout = -1
RUN: StepLayout = -2


class Like(NamedTuple):
    """The layout of an operand whose elements have the same offsets as those of an earlier operand.

    The kernel computes these offsets once.

    Attributes:
        operand: the index of the earlier operand.
    """

    operand: int


class Late(NamedTuple):
    """Delays of an input: one delay for each element of the step.

    At step `t`, the step function receives the value that the input has at step `t - floor(delay)`, or 0 if there is no
    such step.

    Attributes:
        by: index of the input that contains the delays. The memory of this input contains one step of floating-point
            numbers.
        most: the upper limit of the delays, in steps. A delay above this limit is treated as the limit, and a negative
            delay as 0.
    """

    by: int
    most: int


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout of a sequence.

    Attributes:
        step: layout within a step.
        strided_time: True if the distance between two steps is an argument, False if it is `NCL`.
        counts_down: True if the input counts down. Memory then contains one int32 number for each element of a step,
            and the element's value at step `t` is this number minus `t`. Only the sign of the value matters: kernels
            may replace any value above 0 with 1.
        early: True if the kernel loads the input into registers one chunk before it uses the input. The flag is
            set for inputs of one byte per element: a GPU cannot copy single bytes to shared memory in advance, so a
            program would otherwise have to wait for each load.
        late: delays of the input, or `None` if the input is not delayed.
        once: True if the input contains the delays of other inputs (`Late.by`), so that memory contains one step.
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
        numbers: numbers that the function takes after `arguments`. Name and source do not depend on their values.
        once: arguments that the function takes last, and whose values are equal in all steps. `None` if the function
            has no such arguments.
        stages: for a kernel on rows and columns, the stages of the function. `source` contains the functions of all
            stages. Empty for other kernels.
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
        """The values of the kernel's integer arguments that represent the function's numbers, by argument name."""
        return {name: integer for number in self.numbers for name, integer in number.integers.items()}


@dataclass(frozen=True, slots=True)
class RowStage:
    """A stage of a function on rows. Each result of the stage is reduced, written, or kept for later stages.

    Attributes:
        core: the function of one element. Its arguments of role `LIFTED` are results of earlier reductions, numbered
            over all stages.
        reductions: for each result that is not kept, the op that reduces it and the dtype of the reduction. Empty if
            the results are written.
        written: the results of the whole function that the stage writes. See `values`.
        whole: True if the results have one element for each element of a row, False if they have one for each row.
        dtypes: dtype of each entry of `written`.
        repeated: indices of results that are written twice. Their second copies are the last entries of `written`.
        kept_results: ports and dtypes of the last results of `core`, which later stages read at each element of a row.
    """

    core: CoreSource
    reductions: tuple[tuple[OpOverload, torch.dtype], ...] = ()
    written: tuple[Port, ...] = ()
    whole: bool = True
    dtypes: tuple[torch.dtype, ...] = ()
    repeated: tuple[int, ...] = ()
    kept_results: tuple[tuple[Port, torch.dtype], ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """For each entry of `written`, the index of the result of `core`."""
        return (*range(len(self.core.results)), *self.repeated)


@dataclass(frozen=True, slots=True)
class Once:
    """Arguments of a core that are equal in all steps, and are therefore computed before the loop over time.

    Attributes:
        core: the function that computes these arguments from lifted tensors and the step's numbers.
        dtypes: dtypes of these arguments, in order.
    """

    core: CoreSource
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's source, and the arguments with which the kernel is called.

    Attributes:
        name, source: the name of the kernel's function, and the text of the module that defines the function.
        params: the tensor arguments, which come first.
        sizes: the names of the integer arguments, which follow the tensors. In a scan, they begin with ``"T"`` and
            ``"NCL"``. The others are the integers of the step's numbers (`CoreSource.integers`), ``"<operand>_time"``,
            ``"<operand>_inner<i>"``, ``"<operand>_size<i>"`` and ``"<operand>_stride<i>"`` for each strided operand,
            ``"ROWS"`` and ``"ROW"`` if the kernel walks rows, and ``"SEGMENTS"`` and ``"BESIDE"`` if it walks segments
            of time. In Triton, the constexpr `BLOCK` follows: the number of elements per program.
        target: the target of the source.
    """

    name: str
    source: str
    params: tuple[Port, ...]
    sizes: tuple[str, ...]
    target: Target


_MAX_NAME = 80


def identifier(text: str, limit: int | None = _MAX_NAME, reserved: Collection[str] = ()) -> str:
    """Turns a text into an identifier. Identifiers may become file names, so their length is limited by default.

    Args:
        limit: the largest number of characters of `text` that the identifier contains. `None` for all characters.
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
    """Joins the header of the target, the functions of some cores, and a kernel into the source of a module.

    Args:
        name: start of the kernel's name. A hash of `content` follows.
        params, sizes: see `KernelSource`.
        cores: the functions that the kernel calls, in order.
        content: everything that distinguishes the kernel from other kernels.
        kernel: a function that receives the complete name, and returns the text of the kernel's function.
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    full = f"{identifier(name, reserved=target.reserved)}_{digest}"
    functions = "\n\n".join(core.source for core in cores)
    source = f"{target.header}\n\n{functions}\n\n{kernel(full)}"
    return KernelSource(full, source, tuple(params), tuple(sizes), target)
