"""Weights whose rows consist of multiples of a power of two, so that sums with spikes are exact in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsn_nn.errors import ParameterError

# float32 can represent all whole numbers up to 2 ** 24. The limit is a little lower, because sums of the bfloat16 parts
# of numbers can be a little larger than sums of the numbers.
_LARGEST_SUM = 2.0**24 * (1 - 2.0**-6)
# Beyond these exponents, the bfloat16 parts of a number might not be normal float32 numbers.
_EXPONENTS = (-100.0, 100.0)
# In float64, numbers from 1/2 to just below 1 have the biased exponent `_HALF`.
_MANTISSA_BITS, _HALF = 52, 1022


def exponents(weight: Tensor, bits: int, largest_input: int, bias: Tensor | None, *, rounding: bool) -> Tensor:
    """Finds, for each row, the largest `e` for which sums of the whole numbers `weight * 2 ** e` are exact.

    Args:
        weight: `[rows, ...]`, of any floating-point dtype.
        bits: number of bits of the whole numbers, whose magnitude is below `2 ** (bits - 1)`.
        largest_input: largest magnitude of the inputs by which the whole numbers are multiplied.
        bias: `[rows]`, added to the sums; `None` without a bias.
        rounding: True if the weight will be rounded to the grid, False if the weight is already on the grid.

    Returns:
        `e`, float64 `[rows, 1, ...]`.
    """
    rows = weight.detach().abs().flatten(1).double()
    row_length = rows.shape[1]
    total, limit = rows.sum(1) * largest_input, _LARGEST_SUM
    if bias is not None:
        total = total + bias.detach().abs().double()
    if rounding:
        limit -= 0.5 * row_length * largest_input + 1
    e = torch.minimum(_find_exponent_below(limit, total), _find_exponent_below(2.0 ** (bits - 1), rows.amax(1)))
    return e.clamp(*_EXPONENTS).reshape(-1, *(1,) * (weight.dim() - 1))


def _find_exponent_below(limit: float, value: Tensor) -> Tensor:
    """Computes the largest whole exponent `e` with `value * 2 ** e < limit`, without rounding; 1022 if `value` is 0.

    Reads the bits of the quotient instead of calling `frexp`, for which Inductor of torch 2.11 writes C++ code that
    does not compile.
    """
    exponent = (value / limit).view(torch.int64) >> _MANTISSA_BITS
    return (_HALF - exponent).double()


def round_to_grid(values: Tensor, e: Tensor, bits: int | None) -> Tensor:
    """Rounds `values` to `2 ** -e` times whole numbers of at most `bits` bits, or of any size if `bits` is `None`."""
    scale = torch.exp2(e)
    multiples = torch.round(values.detach().double() * scale)
    if bits is not None:
        largest = 2.0 ** (bits - 1) - 1
        multiples = multiples.clamp(-largest, largest)
    return (multiples / scale).to(values.dtype)


def is_on_grid(weight: Tensor, bits: int = 16, largest_input: int = 1) -> bool:
    """True if each row of a weight is on a grid, so that sums are exact. Reads the weight, and waits for a GPU."""
    if weight.dim() < 2 or weight.dtype != torch.float32 or weight.numel() == 0:
        return False
    e = exponents(weight, bits, largest_input, None, rounding=False)
    return bool(torch.equal(round_to_grid(weight, e, bits), weight.detach()))


def whole_numbers(weight: Tensor, bits: int = 16, largest_input: int = 1) -> tuple[Tensor, Tensor]:
    """Returns the whole numbers and the scales of a weight on a grid, for hardware and programs that multiply integers.

    Args:
        weight: `[rows, ...]` float32, weight of a layer with `on_grid`.
        bits, largest_input: same as for `on_grid`.

    Returns:
        int8 or int16 numbers, shaped like `weight`, and a power of two for each row, float32 `[rows]`. The product of
        the two is `weight`.

    Raises:
        ParameterError: the weight is not on a grid with these properties.

    Example:
        >>> from flexsn_nn import on_grid
        >>> layer = torch.nn.Linear(8, 4)
        >>> _ = on_grid(layer, bits=8)
        >>> numbers, scales = whole_numbers(layer.weight, bits=8)
        >>> numbers.dtype, bool((numbers * scales[:, None] == layer.weight).all())
        (torch.int8, True)
    """
    if not is_on_grid(weight, bits, largest_input):
        raise ParameterError(f"the weight is not on a grid of {bits} bits: call flexsn_nn.on_grid(layer, bits={bits}).")
    e = exponents(weight, bits, largest_input, None, rounding=False)
    numbers = (weight.detach().double() * torch.exp2(e)).to(torch.int8 if bits <= 8 else torch.int16)
    return numbers, torch.exp2(-e).flatten().float()
