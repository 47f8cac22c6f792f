"""Gradients of matrices, sums over time of products of two values: on tensor cores where one of them is of spikes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexsn_runtime.products import (
    compilations_with_spikes,
    fewest_multiplications,
    product_with_spikes,
    why_slow_product,
)


def summed_product(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> Tensor:
    """The sum over time of `left @ right`, `[T, rows, inner]` and `[T, inner, columns]`.

    Args:
        exact: for each factor, its numbers are of bfloat16, but perhaps for those of an initial state. Of float32, the
            other one is multiplied in three parts then, as exactly as in float32.
    """
    steps, rows, inner = left.shape
    columns = right.shape[2]
    factors = _factors(left, right, exact)
    if factors is not None:
        total: Tensor = product_with_spikes(*factors)
        return total if exact[1] else total.t().contiguous()
    return left.permute(1, 0, 2).reshape(rows, steps * inner) @ right.reshape(steps * inner, columns)


def compilations_of_sum(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> list[Callable[[], object]]:
    """Functions that compile `summed_product` for tensors like these."""
    factors = _factors(left, right, exact)
    return [] if factors is None else compilations_with_spikes(*factors)


def _factors(left: Tensor, right: Tensor, exact: tuple[bool, bool]) -> tuple[Tensor, Tensor] | None:
    """The factors of one product of all rows, whose second one is exact; `None`: a library multiplies them."""
    steps, rows, inner = left.shape
    columns = right.shape[2]
    if not any(exact) or not _pays(left, steps * rows * inner * columns):
        return None
    down, across = left.transpose(1, 2).reshape(-1, rows), right.reshape(-1, columns)
    return (down, across) if exact[1] else (across, down)


def _pays(value: Tensor, multiplications: int) -> bool:
    """True for a product that is faster in parts, and that no setting makes a product in TF32."""
    return (
        value.dtype == torch.float32
        and value.is_cuda
        and torch.get_float32_matmul_precision() == "highest"
        and multiplications >= fewest_multiplications()
        and why_slow_product(value.device) is None
    )
