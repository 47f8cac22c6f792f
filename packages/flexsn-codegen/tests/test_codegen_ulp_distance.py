"""`ulp_distance` counts the numbers of a dtype between two numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from ulp_distance import NOT_A_NUMBER, ulp_distance, zero_signs_differ

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]


def make_numbers(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def list_in_order(dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a half dtype in ascending order, from -inf to inf, with only one zero."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    values = values[~values.isnan() & ~((values == 0) & torch.signbit(values))]
    return values[values.double().argsort()]


@pytest.mark.parametrize("dtype", HALVES)
def test_distance_counts_the_numbers_between(dtype: torch.dtype) -> None:
    values = list_in_order(dtype)
    generator = torch.Generator().manual_seed(0)
    i, j = (torch.randint(len(values), (20_000,), generator=generator) for _ in range(2))
    assert torch.equal(ulp_distance(values[i], values[j]), (i - j).abs())
    assert values[0] == -math.inf
    assert int(ulp_distance(values[:1], values[-1:])) == len(values) - 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_one_apart(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = make_numbers(0.0, -0.0, 1.0, -1.0, info.tiny, -info.tiny, info.smallest_normal / 2, 3.0, info.max, dtype=dtype)
    up = torch.full_like(x, math.inf)
    assert ulp_distance(torch.nextafter(x, up), x).tolist() == [1] * len(x)
    assert ulp_distance(x, torch.nextafter(x, -up)).tolist() == [1] * len(x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_distance_is_right_across_zero_and_up_to_infinity(dtype: torch.dtype) -> None:
    zero, info = make_numbers(0.0, dtype=dtype), torch.finfo(dtype)
    smallest = torch.nextafter(zero, zero + 1)
    assert ulp_distance(smallest, -smallest).tolist() == [2]
    assert ulp_distance(zero, -zero).tolist() == [0]
    assert ulp_distance(make_numbers(info.max, dtype=dtype), make_numbers(math.inf, dtype=dtype)).tolist() == [1]
    # The smallest normal number is 2**(mantissa bits) steps from zero, because denormals count.
    assert ulp_distance(make_numbers(info.tiny, dtype=dtype), zero).tolist() == [round(1 / info.eps)]


def test_largest_distances_do_not_wrap() -> None:
    inf = torch.tensor([math.inf], dtype=torch.float64)
    assert ulp_distance(inf, -inf).tolist() == [2**63 - 2]
    assert ulp_distance(inf.float(), -inf.float()).tolist() == [2 * 0x7F800000]
    ones = torch.ones(1, dtype=torch.float64)
    assert ulp_distance(inf, ones).tolist() == [(0x7FF - 0x3FF) << 52]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_at_no_distance_from_nan(dtype: torch.dtype) -> None:
    x = make_numbers(math.nan, math.nan, 1.0, math.inf, dtype=dtype)
    y = make_numbers(math.nan, 0.0, math.nan, math.nan, dtype=dtype)
    assert ulp_distance(x, y).tolist() == [0, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER]
    # NaN equals NaN, whatever its bits are.
    assert ulp_distance(x[:1], -x[:1]).tolist() == [0]


def test_distance_of_integers_and_bools_is_their_difference() -> None:
    assert ulp_distance(torch.tensor([3, -3]), torch.tensor([5, 3])).tolist() == [2, 6]
    assert ulp_distance(torch.tensor([True, False]), torch.tensor([True, True])).tolist() == [0, 1]


def test_different_signs_of_zero_are_detected() -> None:
    x, y = make_numbers(0.0, -0.0, 0.0, -1.0), make_numbers(-0.0, -0.0, 1.0, 1.0)
    assert zero_signs_differ(x, y).tolist() == [True, False, False, False]
    assert zero_signs_differ(torch.tensor([0]), torch.tensor([0])).tolist() == [False]
