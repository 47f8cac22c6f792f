"""Maps symbolic sizes to numbers, so that a step can be traced, and maps the numbers back to symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexsn_graph import LiftedLayout
from flexsn_runtime._torch_private import size_expression
from flexsn_runtime.errors import SymbolicSizeError

if TYPE_CHECKING:
    import sympy

# Products of different primes differ, so a number reveals the sizes from which it was computed.
_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

Size = int
"""An int, or a `torch.SymInt`, which torch treats as an int."""


class Assignment:
    """A number for each symbol in the sizes of some tensors.

    Args:
        sizes: all sizes that the assignment will map.
        number: index of the assignment. Two assignments with different indices share no value.
    """

    def __init__(self, sizes: Sequence[Size], number: int) -> None:
        symbols: set[sympy.Symbol] = set().union(*(size_expression(size).free_symbols for size in sizes))
        ordered = sorted(symbols, key=str)
        if len(ordered) > len(_PRIMES) // 2:
            raise SymbolicSizeError(
                f"the tensors' sizes have {len(ordered)} symbols; a kernel can have {len(_PRIMES) // 2}. Mark fewer "
                "dimensions as dynamic."
            )
        self._values = dict(zip(ordered, _PRIMES[number * len(_PRIMES) // 2 :], strict=False))
        self.is_symbolic = bool(ordered)

    def __call__(self, size: Size) -> int:
        return int(size_expression(size).subs(self._values))

    def shape(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        return tuple(self(size) for size in sizes)


def symbolic_layout(
    assignments: Sequence[Assignment], layouts: Sequence[LiftedLayout], shape: Sequence[Size]
) -> LiftedLayout:
    """The layout in terms of the captured tensor's shape. `layouts` contains the numeric layout for each assignment."""
    candidates = _contiguous_strides(shape)

    def symbolic(numbers: Sequence[int]) -> Size:
        if len(set(numbers)) == 1:
            return numbers[0]
        for size in candidates:
            if [assigned(size) for assigned in assignments] == list(numbers):
                return size
        raise SymbolicSizeError(
            "the core reads a captured tensor with a stride or offset that is not a simple function of symbolic "
            "sizes. Create this view of the tensor outside of the core, or compile with dynamic=False."
        )

    strides = tuple(symbolic(numbers) for numbers in zip(*(layout.strides for layout in layouts), strict=True))
    return LiftedLayout(strides, symbolic([layout.offset for layout in layouts]))


def _contiguous_strides(shape: Sequence[Size]) -> list[Size]:
    strides: list[Size] = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * size)
    return strides
