"""Launches the kernels of products with spikes one by one.

The kernels split operands into parts, and multiply the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_runtime.products import _kernels
from flexsn_runtime.products._kernels import is_aligned, padded_units, padding
from flexsn_runtime.products._tiles import Tile, seen_size, shares_of, tile_for


def split(x: Tensor, parts: int) -> Tensor:
    """Splits `x [rows, columns]`, in float32, into bfloat16 parts `[parts, rows, padded columns]`, whose sum is `x`.

    With fewer than three parts, the sum is an approximation of `x`.
    """
    x = _make_rows_dense(x)
    rows, columns = x.shape
    out = torch.empty((parts, rows, padded_units(columns) * padding()), dtype=torch.bfloat16, device=x.device)
    _kernels.splitting(rows, columns, x.stride(0), parts, (is_aligned(x),), x.device)((x, out))
    return out


def narrow(s: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Converts `s [M, K]`, in float32, to bfloat16 `[M, padded K]`. Also returns a record, which marks inexact rows.

    Each entry of the record belongs to `CHECKED_ROWS` rows. The entry is not 0 if bfloat16 cannot represent an element
    of these rows.

    Args:
        scale: the result is `s / scale`. Each element of `s` has to be an integer times `scale`, rounded.
    """
    s = _make_rows_dense(s)
    M, K = s.shape
    spikes = torch.empty((M, padded_units(K) * padding()), dtype=torch.bfloat16, device=s.device)
    seen = torch.empty(seen_size(M), dtype=torch.int32, device=s.device)
    _kernels.narrowing(M, K, s.stride(0), scale, (is_aligned(s),), s.device)((s, spikes, seen))
    return spikes, seen


def product(spikes: Tensor, pieces: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Returns `s W^T + b`, `[M, N]` float32.

    Args:
        spikes: `[M, K]` bfloat16; rows may be padded, as in `pieces`.
        pieces: the parts of the weight, from `split`.
    """
    parts, N, padded = pieces.shape
    (M, row), device = spikes.shape, spikes.device
    y = torch.empty((M, N), dtype=torch.float32, device=device)
    bias_or_output = y if bias is None else bias.contiguous()
    tile = tile or tile_for("outputs", M, N, padded, parts, device)
    are_aligned = is_aligned(spikes), is_aligned(bias_or_output)
    units = padded // padding()
    kernel = _kernels.multiplying(M, N, row, units, parts, bias is not None, 1.0, tile, are_aligned, device)
    kernel((spikes, pieces, bias_or_output, y))
    return y


def product_over_rows(grads: Sequence[Tensor], spikes: Tensor, N: int, K: int, tile: Tile | None = None) -> Tensor:
    """Returns `g^T s`, `[N, K]` float32.

    Args:
        grads: parts of `g`, with the largest first, `[M, N]` each; rows may be padded.
        spikes: `[M, K]` bfloat16; rows may be padded.
    """
    first, parts, device = grads[0], len(grads), spikes.device
    (M, g_row), s_row = first.shape, spikes.shape[1]
    tile = tile or tile_for("weights", N, K, M, parts, device)
    shares = shares_of(tile, N, K, M, device)
    out = torch.empty((shares, N, K), dtype=torch.float32, device=device)
    aligned = is_aligned(first), is_aligned(spikes)
    kernel = _kernels.summing_rows(M, N, K, g_row, s_row, parts, tile, shares, aligned, device)
    kernel((*three(grads), spikes, out))
    if shares == 1:
        return out[0]
    total = torch.empty((N, K), dtype=torch.float32, device=device)
    _kernels.adding_shares(N * K, shares, 1.0, device)((out, total))
    return total


def input_gradient(grads: Sequence[Tensor], pieces: Tensor, K: int, tile: Tile | None = None) -> Tensor:
    """Returns `g W`, `[M, K]` float32.

    Args:
        grads: same as for `product_over_rows`.
        pieces: the parts of the weight `[N, K]`, from `split`.
    """
    first, g_parts = grads[0], len(grads)
    w_parts, N, padded = pieces.shape
    (M, row), device = first.shape, first.device
    out = torch.empty((M, K), dtype=torch.float32, device=device)
    tile = tile or tile_for("inputs", M, K, N, max(w_parts, g_parts), device)
    units = padded // padding()
    kernel = _kernels.leading_back(M, N, K, row, units, g_parts, w_parts, tile, (is_aligned(first),), device)
    kernel((*three(grads), pieces, out))
    return out


def three(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors for a kernel. If there are fewer than three parts, the last part is repeated."""
    last = grads[-1]
    return grads[0], grads[1] if len(grads) > 1 else last, grads[2] if len(grads) > 2 else last


def _make_rows_dense(x: Tensor) -> Tensor:
    """Returns `x` with contiguous rows."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
