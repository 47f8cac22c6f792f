"""Random numbers inside of kernels: functions of a seed and an element's position, with the same bits as in eager mode.

Nothing is stored. The backward recomputes the same numbers. A number depends on the seed, the call
(`Numbers.at`), the draw within the function, and the element's row and column. It does not depend on the device or on
the order in which a kernel computes elements.

Example:
    >>> import torch
    >>> from flexsn_codegen import pointwise, random
    >>> @pointwise
    ... def dropout(x, p, numbers):
    ...     return torch.where(random.uniform(numbers) < p, 0.0, x / (1 - p))
    >>> numbers = random.numbers((64, 100), seed=3)
    >>> x = torch.ones(64, 100)
    >>> torch.equal(dropout(x, 0.5, numbers.at(7)), dropout(x, 0.5, numbers.at(7)))
    True

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError
from flexsn_graph import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER

__all__ = ["Numbers", "normal", "numbers", "uniform"]

_LIMIT = 2**31


class Numbers(NamedTuple):
    """The seed and the positions of random numbers, as an argument of a function, created by `numbers`.

    Attributes:
        low, high: the seed's halves, int32, without dimensions.
        row, column: row and column of each element, int32. `row` and `column` broadcast to the shape of the elements.
        call: the number of the function's call, int32, without dimensions.
    """

    low: Tensor
    high: Tensor
    row: Tensor
    column: Tensor
    call: Tensor

    def at(self, call: int) -> Numbers:
        """The argument `Numbers` for another call. `call` is an integer from 0 to 2^31 - 1."""
        if not 0 <= call < _LIMIT:
            raise ArgumentError(f"call is {call}; it must be from 0 to 2**31 - 1.")
        return self._replace(call=torch.full_like(self.call, call))


def numbers(shape: Sequence[int], *, seed: int, device: torch.device | str | None = None) -> Numbers:
    """The argument `Numbers` for elements of a shape, and for call 0.

    Args:
        shape: shape of the elements. All dimensions except for the last one form the rows. There must be fewer than
            2^31 rows, and fewer than 2^31 columns.
        seed: an integer of 64 bits.
        device: device of the elements.

    Raises:
        ArgumentError: the shape has 2^31 or more rows or columns.
    """
    *leading, columns = (1, *shape)
    rows = torch.Size(leading).numel()
    if max(rows, columns) >= _LIMIT:
        raise ArgumentError(f"{list(shape)} has {rows} rows of {columns} elements: both numbers must be below 2**31.")
    low, high = (((seed >> shift & 0xFFFFFFFF) ^ 2**31) - 2**31 for shift in (0, 32))
    halves = [torch.tensor(half, dtype=torch.int32, device=device) for half in (low, high)]
    row = torch.arange(rows, dtype=torch.int32, device=device).view(*leading[1:], 1) if len(shape) > 1 else None
    column = torch.arange(columns, dtype=torch.int32, device=device)
    zero = torch.zeros((), dtype=torch.int32, device=device)
    return Numbers(halves[0], halves[1], zero if row is None else row, column if shape else column[0], zero)


def uniform(numbers: Numbers, *, draw: int = 0) -> Tensor:
    """Random multiples of 2^-24 in [0, 1), uniformly distributed, as a float32 tensor with one number per element.

    Args:
        numbers: seed and positions of the elements.
        draw: index of the draw. Different draws are independent of each other.
    """
    result: Tensor = UNIFORM_NUMBER(*_compute_element_words(numbers), numbers.call, stream=draw, bits=24)
    return result


def normal(numbers: Numbers, *, draw: int = 0) -> Tensor:
    """Normally distributed numbers of mean 0 and variance 1, float32, between -6.6 and 6.6. See `uniform`."""
    result: Tensor = NORMAL_NUMBER(*_compute_element_words(numbers), numbers.call, stream=draw)
    return result


def _compute_element_words(numbers: Numbers) -> list[Tensor]:
    low, high, row, column, _ = numbers
    return [ELEMENT_WORD(low, high, row, column, index=index) for index in range(3)]
