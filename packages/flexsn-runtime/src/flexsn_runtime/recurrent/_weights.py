"""Gradients of matrices: products of two values, summed over time. Tensor cores compute products with spikes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexsn_runtime._float32_precision import float32_precision
from flexsn_runtime.products import (
    compilations_with_spikes,
    fewest_multiplications,
    product_with_spikes,
    why_slow_product,
)


def summed_product(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> Tensor:
    """Returns the sum over time of `left @ right`, for `[T, rows, inner]` and `[T, inner, columns]`.

    Args:
        exact: for each factor, True if bfloat16 can represent its elements, except perhaps the elements of an initial
            state. If one factor is exact and the other is float32, the float32 factor is multiplied in three parts,
            which is as exact as a product in float32.
    """
    steps, rows, inner = left.shape
    columns = right.shape[2]
    factors = _select_factors(left, right, exact)
    if factors is not None:
        total: Tensor = product_with_spikes(*factors)
        return total if exact[1] else total.t().contiguous()
    return left.permute(1, 0, 2).reshape(rows, steps * inner) @ right.reshape(steps * inner, columns)


def compilations_of_sum(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> list[Callable[[], object]]:
    """Returns functions that compile `summed_product` for tensors like these."""
    factors = _select_factors(left, right, exact)
    return [] if factors is None else compilations_with_spikes(*factors)


def _select_factors(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> tuple[Tensor, Tensor] | None:
    """Returns the factors of one product of all rows, with an exact second factor; `None` to use a library."""
    steps, rows, inner = left.shape
    columns = right.shape[2]
    if not any(exact) or not _pays_off(left, steps * inner, rows, columns):
        return None
    down, across = left.transpose(1, 2).reshape(-1, rows), right.reshape(-1, columns)
    return (down, across) if exact[1] else (across, down)


# Minimum number of multiplications per element of the factors for which products in parts pay off. With fewer
# multiplications, splitting the elements into parts takes longer than multiplying them. On an H100, a million rows of
# 64 and 64 elements take 629 us in parts and 237 us in float32; 64,000 rows of 256 and 256 elements take 155 us and 160
# us.
_FEWEST_OF_A_NUMBER = 128


def _pays_off(value: Tensor, terms: int, rows: int, columns: int) -> bool:
    """True for a product that is faster in parts, unless a setting allows products in TF32.

    Args:
        terms: number of terms of each sum.
        rows, columns: shape of the product.
    """
    return (
        value.dtype == torch.float32
        and value.is_cuda
        and float32_precision() == "highest"
        and terms * rows * columns >= fewest_multiplications()
        and rows * columns >= _FEWEST_OF_A_NUMBER * (rows + columns)
        and why_slow_product(value.device) is None
    )
