"""Results that are zeros and ones, recognized by their operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexsn_graph import not_zero_one, trace_step


def above(x: Tensor) -> Tensor:
    return (x > 0.5).to(x.dtype)


YES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a comparison": lambda x, v: above(x),
    "a flag": lambda x, v: x > v,
    "a combination of flags": lambda x, v: ((x > v) | ~(v < 0)).float(),
    "a product": lambda x, v: above(x) * above(v),
    "a complement": lambda x, v: 1 - above(x),
    "a selection": lambda x, v: torch.where(x * v > 0.3, above(x), 1.0 - above(v)),
    "a selection of 1 and 0": lambda x, v: torch.where(x > v, 1.0, 0.0),
    "a maximum": lambda x, v: torch.maximum(above(x), torch.minimum(above(v), above(x - v))),
    "another dtype": lambda x, v: above(x).double(),
    "zeros": lambda x, v: torch.zeros_like(x),
}
NO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an argument": lambda x, v: v,
    "a sum": lambda x, v: above(x) + above(v),
    "a multiple": lambda x, v: 2 * above(x),
    "a difference from 2": lambda x, v: 2 - above(x),
    "a sign": lambda x, v: torch.sign(x),
    "a selection": lambda x, v: torch.where(x > v, above(x), v),
    "a selection of 1 and 0.5": lambda x, v: torch.where(x > v, 1.0, 0.5),
    "a maximum": lambda x, v: torch.maximum(above(x), x),
}


def find_reason(function: Callable[[Tensor, Tensor], Tensor]) -> object:
    examples = torch.empty(3, 4), torch.empty(3, 4)
    return not_zero_one(trace_step(lambda x, v: (x, function(x, v), v), 1, 1, 2, examples).forward, 1)


@pytest.mark.parametrize("name", YES)
def test_results_of_zeros_and_ones_are_recognized(name: str) -> None:
    assert find_reason(YES[name]) is None


@pytest.mark.parametrize("name", NO)
def test_other_results_are_not_recognized(name: str) -> None:
    assert find_reason(NO[name]) is not None
