"""Division of a step into rows that a program processes one after the other, for gradients of captured tensors.

Each element of the step contributes to such a gradient. Elements at equal positions in different rows read the same
elements of all captured tensors. A program therefore adds up their contributions in its registers, and writes only a
fraction of the bytes. The sum over all programs then reads fewer bytes, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flexsn_graph import LiftedLayout
from flexsn_runtime._availability import triton_interpreted

# Maximum number of rows. More rows would save few additional bytes, but leave too few programs to fill a GPU like the
# H200.
_MOST = 16
_FEWEST_PROGRAMS = 1024

# Rows begin at multiples of this number of elements; otherwise each element would be loaded separately.
_ALIGNED = 16

# Maximum number of elements per thread. A thread keeps the sums of its elements in registers, together with all other
# values. For small steps, a smaller maximum is faster: on an H100, with two elements per thread, the backward of a norm
# and a LIF takes 7 % less time for 3 million bfloat16 elements, and 4 % more for 26 million.
_ELEMENTS = 4
_SMALL, _ELEMENTS_OF_SMALL = 2**23, 2


class Rows(NamedTuple):
    """The division of a step into rows.

    Attributes:
        number: number of rows; the last row may be incomplete.
        shape: shape of a row, in the order in which the kernel counts elements.
        outer: number of the step's leading dimensions that are divided; they form the first dimension of `shape`.
    """

    number: int
    shape: tuple[int, ...]
    outer: int

    def layout(self, step: LiftedLayout) -> LiftedLayout:
        """Returns the layout in which a row reads a tensor, from the layout `step` in which the step reads it."""
        return LiftedLayout((0, *step.strides[self.outer :]), step.offset)

    @property
    def integers(self) -> dict[str, int]:
        """Integer arguments of the kernel."""
        return {"ROWS": self.number, "ROW": math.prod(self.shape)}


def rows(shape: Sequence[int], layouts: Sequence[LiftedLayout], block: int) -> Rows | None:
    """Divides a step into rows for programs of `block` elements. Returns `None` if rows would not pay off.

    Args:
        shape: the step's shape, in the order in which the kernel counts its elements.
        layouts: layouts in which the step reads captured tensors, with dimensions in the same order.
    """
    if not all(type(size) is int for size in (*shape, *(n for layout in layouts for n in layout.strides))):
        return None  # a kernel for symbolic sizes must work for all sizes
    outer = 0
    while outer < len(shape) and all(layout.strides[outer] == 0 or shape[outer] == 1 for layout in layouts):
        outer += 1
    places, inner = math.prod(shape[:outer]), math.prod(shape[outer:])
    min_programs = 2 if triton_interpreted() else _FEWEST_PROGRAMS
    count = min(_MOST, places, places * inner // (block * min_programs))
    if count < 2:
        return None
    multiple = _ALIGNED // math.gcd(inner, _ALIGNED)
    row_length = -(-places // (count * multiple)) * multiple
    number = -(-places // row_length)
    return Rows(number, (row_length, *shape[outer:]), outer) if number > 1 else None


def fewer_elements(block: int, num_warps: int, step: int) -> int:
    """Returns the number of elements per program, at most `block`, for rows of a step with `step` elements."""
    # A symbol is not compared with a number, because steps of symbolic sizes have no rows.
    is_small = type(step) is int and step <= _SMALL and not triton_interpreted()
    elements = min(_ELEMENTS, _ELEMENTS_OF_SMALL) if is_small else _ELEMENTS
    return min(block, elements * 32 * num_warps)
