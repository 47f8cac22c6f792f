"""Reductions of rows `[rows, columns]` to `[rows, 1]`. `inside` is False for padding, whose values are ignored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device._base import INTERPRETED, load, store

if INTERPRETED:
    from flexsn_codegen.targets.triton.device._interpreted import _of_type, _to_torch

    def _reduced(x: Any, inside: Any, padding: float, reduce: Any) -> Any:
        shape = [int(size) for size in x.shape]
        counts = _to_torch(tl.broadcast_to(inside, shape)).bool().view(shape)
        value = _to_torch(x).view(shape)
        padded = torch.where(counts, value, torch.tensor(padding, dtype=value.dtype))
        # `_of_type` keeps the shape of `x`, so the reduced values are padded with zeros and summed to one column.
        row = torch.zeros_like(value)
        row[:, :1] = reduce(padded, 1, keepdim=True)
        return tl.sum(_of_type(x, row, x.dtype), axis=1, keep_dims=True)

    def row_sum(x: Any, inside: Any) -> Any:
        return _reduced(x, inside, 0, torch.sum)

    def row_max(x: Any, inside: Any) -> Any:
        return _reduced(x, inside, float("-inf"), torch.amax)

    def row_min(x: Any, inside: Any) -> Any:
        return _reduced(x, inside, float("inf"), torch.amin)

else:

    @triton.jit
    def _larger(x, y):
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _smaller(x, y):
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def row_sum(x, inside):
        return tl.sum(tl.where(inside, x, 0), axis=1, keep_dims=True)

    @triton.jit
    def row_max(x, inside):
        return tl.reduce(tl.where(inside, x, float("-inf")), 1, _larger, keep_dims=True)

    @triton.jit
    def row_min(x, inside):
        return tl.reduce(tl.where(inside, x, float("inf")), 1, _smaller, keep_dims=True)


@triton.jit
def load_pair(pointers, mask):
    """Loads two blocks `[rows, columns]` whose elements are interleaved at `pointers [rows, 2 * columns]`."""
    both = load(pointers, mask)
    return tl.split(tl.reshape(both, [both.shape[0], both.shape[1] // 2, 2]))


@triton.jit
def store_pair(pointers, first, second, mask):
    """Stores two blocks in the layout that `load_pair` reads."""
    both = tl.join(first, second)
    store(pointers, tl.reshape(both, [both.shape[0], both.shape[1] * 2]), mask)


@triton.jit
def row_var(x, inside, one_of_all, one_of_counted):
    """The variance of rows. `one_of_all` is 1 / columns, and `one_of_counted` is 1 / (columns - correction)."""
    distance = x - row_sum(x, inside) * one_of_all
    return row_sum(distance * distance, inside) * one_of_counted
