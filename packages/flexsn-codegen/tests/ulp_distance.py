"""The distance between two floating-point numbers, in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
#: The distance between a number and NaN.
NOT_A_NUMBER = 2**63 - 1


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns the distance between `actual` and `expected`, in steps from one number of the dtype to the next.

    Args:
        actual: tensor of any floating-point dtype of Triton. For integers and bool, the distance is the difference.
        expected: tensor of equal dtype and shape.

    Returns:
        The distances as int64, in the arguments' shape. Zeros of both signs are one number, denormals count like all
        other numbers, and infinity is next to the largest number. Two NaNs have distance 0, and the distance between
        NaN and a number is `NOT_A_NUMBER`. In float64, distances across zero are at most `2**63 - 2`.
    Example:
        >>> ulp_distance(torch.tensor([1.0]), torch.tensor([1.0 + 2**-22]))
        tensor([2])
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if not actual.is_floating_point():
        return (actual.to(torch.int64) - expected.to(torch.int64)).abs()
    x, y = _places_from_zero(actual), _places_from_zero(expected)
    same_side = torch.signbit(actual) == torch.signbit(expected)
    # In float64, both distances from zero are at most 0x7ff0...0, so their sum may exceed 2**63.
    half = 2**62 - 1
    distance = torch.where(same_side, (x - y).abs(), x.clamp(max=half) + y.clamp(max=half))
    nan, other_nan = actual.isnan(), expected.isnan()
    distance = distance.masked_fill(nan & other_nan, 0)
    return distance.masked_fill(nan ^ other_nan, NOT_A_NUMBER)


def zero_signs_differ(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns a mask of zeros whose signs differ. The zeros are equal, but their inverses are not."""
    if not actual.is_floating_point():
        return torch.zeros_like(actual, dtype=torch.bool)
    return (actual == 0) & (expected == 0) & (torch.signbit(actual) != torch.signbit(expected))


def _places_from_zero(x: Tensor) -> Tensor:
    """Returns the bits without the sign, which equal the number of steps from zero to `x`."""
    bits = x.view(_BITS[x.dtype]).to(torch.int64)
    return bits & torch.iinfo(_BITS[x.dtype]).max
