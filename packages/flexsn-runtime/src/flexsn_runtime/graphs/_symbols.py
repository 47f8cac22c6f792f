"""Assigns integers to symbolic sizes, so that a step can be traced, and finds the symbolic size of an integer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexsn_graph import LiftedLayout
from flexsn_runtime._torch_private import size_expression
from flexsn_runtime.errors import SymbolicSizeError

if TYPE_CHECKING:
    import sympy

# Products of different primes are different, so an integer determines the sizes of which it is the product.
_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

Size = int
"""An int, or a `torch.SymInt`, which torch accepts in place of an int."""


class Assignment:
    """Assigns a prime to each symbol in the sizes of some tensors. A call maps a size to an integer.

    Args:
        sizes: all sizes with which the assignment is called.
        number: index of the assignment, 0 or 1. The two assignments have no prime in common.
    """

    def __init__(self, sizes: Sequence[Size], number: int) -> None:
        symbols: set[sympy.Symbol] = set().union(*(size_expression(size).free_symbols for size in sizes))
        sorted_symbols = sorted(symbols, key=str)
        if len(sorted_symbols) > len(_PRIMES) // 2:
            raise SymbolicSizeError(
                f"the tensors' sizes have {len(sorted_symbols)} symbols; a kernel can have {len(_PRIMES) // 2}. Mark "
                "fewer dimensions as dynamic."
            )
        self._values = dict(zip(sorted_symbols, _PRIMES[number * len(_PRIMES) // 2 :], strict=False))
        self.is_symbolic = bool(sorted_symbols)

    def __call__(self, size: Size) -> int:
        return int(size_expression(size).subs(self._values))

    def shape(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        return tuple(self(size) for size in sizes)


def symbolic_layout(
    assignments: Sequence[Assignment], layouts: Sequence[LiftedLayout], shape: Sequence[Size]
) -> LiftedLayout:
    """Returns the layout of a captured tensor, in terms of the symbolic sizes in its shape.

    Args:
        layouts: for each assignment, the layout for the assigned integers.
        shape: shape of the captured tensor.
    """
    candidates = _compute_contiguous_strides(shape)

    def find_symbolic(numbers: Sequence[int]) -> Size:
        if len(set(numbers)) == 1:
            return numbers[0]
        for size in candidates:
            if [assigned(size) for assigned in assignments] == list(numbers):
                return size
        raise SymbolicSizeError(
            "the core reads a captured tensor with a stride or offset that is not a simple function of symbolic "
            "sizes. Create this view of the tensor outside of the core, or compile with dynamic=False."
        )

    strides = tuple(find_symbolic(numbers) for numbers in zip(*(layout.strides for layout in layouts), strict=True))
    return LiftedLayout(strides, find_symbolic([layout.offset for layout in layouts]))


def _compute_contiguous_strides(shape: Sequence[Size]) -> list[Size]:
    strides: list[Size] = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * size)
    return strides
