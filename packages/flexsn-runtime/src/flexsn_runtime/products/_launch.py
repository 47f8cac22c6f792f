"""Products with spikes, launched: operands in parts, and the products of them."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import PreparedKernel, prepared
from flexsn_runtime.products._tiles import CHECKED_ROWS, Tile, seen_size, shares_of, tile_for

# Programs of a kernel that usually finds nothing to do.
_REPAIRERS = 128
_REPAIR_TILE = 64
_SEEN = 1024
_GROUP = 8
# Numbers of a row that one load can take: of rows that are multiples of it.
_UNITS = (64, 8)
_ALIGNMENT = 16


def split(x: Tensor, parts: int) -> Tensor:
    """`x [rows, columns]` float32 as the sum of `parts` bfloat16 tensors, `[parts, rows, padded columns]`."""
    x = _dense_rows(x)
    rows, columns = x.shape
    padding = _kernels().PADDING
    padded = -(-columns // padding)
    out = torch.empty((parts, rows, padded * padding), dtype=torch.bfloat16, device=x.device)
    row, unit = x.stride(0), _unit(x)

    def make() -> PreparedKernel:
        block = (16, 64) if triton_interpreted() else (16, 128)
        grid = (-(-rows // block[0]), -(-padded * padding // block[1]))
        numbers = (rows, columns // unit, row // unit, padded, parts, unit, *block)
        return PreparedKernel(_kernels().split_kernel, grid, numbers, x.device)

    prepared(("split", rows, columns, row, parts, unit, _aligned(x), x.device), make)(x, out)
    return out


def narrow(s: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`s [M, K]` float32 in bfloat16, `[M, padded K]`, and a record that is not 0 for rows that are not whole there.

    Args:
        scale: that of `s / scale` instead, where each number of `s` is a whole one times this, rounded.
    """
    s = _dense_rows(s)
    M, K = s.shape
    padding = _kernels().PADDING
    padded = -(-K // padding)
    spikes = torch.empty((M, padded * padding), dtype=torch.bfloat16, device=s.device)
    seen = torch.empty(seen_size(M), dtype=torch.int32, device=s.device)
    row, unit = s.stride(0), _unit(s)

    def make() -> PreparedKernel:
        numbers = (M, K // unit, row // unit, padded, _bits(scale))
        constants = (scale != 1.0, unit, CHECKED_ROWS, 64 if triton_interpreted() else 256)
        return PreparedKernel(_kernels().narrow_kernel, (-(-M // CHECKED_ROWS),), (*numbers, *constants), s.device)

    prepared(("narrow", M, K, row, scale, _aligned(s), s.device), make)(s, spikes, seen)
    return spikes, seen


def product(
    spikes: Tensor,
    pieces: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    *,
    lead: tuple[int, ...] = (),
    scale: float = 1.0,
) -> Tensor:
    """`scale s W^T + b`, `[M, N]` float32.

    Args:
        spikes: `[M, K]` bfloat16, or with rows padded as those of `pieces`.
        pieces: of the weight, from `split`.
        lead: dimensions of the result in the place of M.
    """
    parts, N, padded = pieces.shape
    M, row = spikes.shape
    device = spikes.device
    y = torch.empty((*(lead or (M,)), N), dtype=torch.float32, device=device)
    bias = None if bias is None else bias.contiguous()

    def make() -> PreparedKernel:
        of = tile or tile_for("outputs", M, N, parts, device)
        unit = _row_unit(spikes)
        numbers = (M, N, row // unit, padded // _kernels().PADDING, _bits(scale))
        constants = (scale != 1.0, unit, parts, bias is not None, of.rows, of.columns, of.chunk, _GROUP, of.leaves)
        grid = (-(-M // of.rows) * -(-N // of.columns),)
        return PreparedKernel(_kernels().outputs_kernel, grid, (*numbers, *constants), device, of.num_warps, of.stages)

    added = y if bias is None else bias
    aligned = _aligned(spikes), _aligned(added)
    key = ("outputs", M, row, N, padded, parts, bias is not None, scale, tile, aligned, device)
    prepared(key, make)(spikes, pieces, added, y)
    return y


def repair_outputs(s: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, seen: Tensor) -> None:
    """Computes rows of `y = s W^T + b` in float32 again where `seen`, a record of `narrow`, is not 0."""
    s, weight = _dense_rows(s), weight.contiguous()
    (M, K), N, row = s.shape, weight.shape[0], s.stride(0)
    added = y if bias is None else bias.contiguous()

    def make() -> PreparedKernel:
        programs = min(_REPAIRERS, -(-M // CHECKED_ROWS) * -(-N // _REPAIR_TILE))
        constants = (bias is not None, CHECKED_ROWS, _REPAIR_TILE, 16, _SEEN)
        return PreparedKernel(
            _kernels().repair_outputs_kernel, (programs,), (M, N, K, row, *constants), s.device, stages=2
        )

    aligned = tuple(map(_aligned, (s, weight, added)))
    prepared(("repair outputs", M, N, K, row, bias is not None, aligned, s.device), make)(s, weight, added, y, seen)


def product_over_rows(grads: Sequence[Tensor], spikes: Tensor, N: int, K: int, tile: Tile | None = None) -> Tensor:
    """`g^T s`, `[N, K]` float32.

    Args:
        grads: parts of `g`, largest first, `[M, N]` each or with padded rows.
        spikes: `[M, K]` bfloat16, or with padded rows.
    """
    first, parts, device = grads[0], len(grads), spikes.device
    M, g_row = first.shape
    s_row = spikes.shape[1]
    of = tile or _tile_over_rows(N, K, parts, device)
    tiles = -(-N // of.rows) * -(-K // of.columns)
    shares = of.shares or shares_of(tiles, -(-M // of.chunk), device)
    out = torch.empty((shares, N, K), dtype=torch.float32, device=device)

    def make() -> PreparedKernel:
        g_unit, s_unit = _row_unit(first), _row_unit(spikes)
        numbers = (M, N, K, g_row // g_unit, s_row // s_unit)
        constants = (g_unit, s_unit, parts, of.rows, of.columns, of.chunk)
        return PreparedKernel(
            _kernels().weights_kernel, (tiles, shares), (*numbers, *constants), device, of.num_warps, of.stages
        )

    key = ("weights", M, N, K, g_row, s_row, parts, tile, _aligned(first), _aligned(spikes), device)
    prepared(key, make)(*_three(grads), spikes, out)
    return out[0] if shares == 1 else out.sum(0)


def repair_weights(grads: Sequence[Tensor], s: Tensor, total: Tensor, seen: Tensor) -> None:
    """Computes `total = g^T s` in float32 again if `seen`, a record of `narrow`, is not 0.

    Args:
        grads: as for `product_over_rows`; or `g` itself, float32.
        s: `[M, K]` float32.
    """
    grads, s = [_dense_rows(g) for g in grads], _dense_rows(s)
    (N, K), M, parts = total.shape, s.shape[0], len(grads)
    g_row, s_row = grads[0].stride(0), s.stride(0)

    def make() -> PreparedKernel:
        programs = min(_REPAIRERS, -(-N // _REPAIR_TILE) * -(-K // _REPAIR_TILE))
        numbers = (M, N, K, g_row, s_row, seen.numel())
        constants = (parts, _REPAIR_TILE, _REPAIR_TILE, 16, _SEEN)
        return PreparedKernel(_kernels().repair_weights_kernel, (programs,), (*numbers, *constants), s.device, stages=2)

    aligned = (_aligned(grads[0]), _aligned(s))
    key = ("repair weights", M, N, K, g_row, s_row, parts, grads[0].dtype, aligned, s.device)
    prepared(key, make)(*_three(grads), s, total, seen)


def input_gradient(grads: Sequence[Tensor], pieces: Tensor, K: int, tile: Tile | None = None) -> Tensor:
    """`g W`, `[M, K]` float32.

    Args:
        grads: as for `product_over_rows`.
        pieces: of the weight `[N, K]`, from `split`.
    """
    first, g_parts = grads[0], len(grads)
    w_parts, N, padded = pieces.shape
    M, row = first.shape
    device = first.device
    out = torch.empty((M, K), dtype=torch.float32, device=device)

    def make() -> PreparedKernel:
        of = tile or tile_for("inputs", M, K, max(w_parts, g_parts), device)
        unit = _row_unit(first)
        numbers = (M, N, K, row // unit, padded // _kernels().PADDING)
        constants = (unit, g_parts, w_parts, of.rows, of.columns, of.chunk, _GROUP, of.leaves)
        grid = (-(-M // of.rows) * -(-K // of.columns),)
        return PreparedKernel(_kernels().inputs_kernel, grid, (*numbers, *constants), device, of.num_warps, of.stages)

    key = ("inputs", M, N, K, row, padded, g_parts, w_parts, tile, _aligned(first), device)
    prepared(key, make)(*_three(grads), pieces, out)
    return out


def _bits(scale: float) -> int:
    """Those of a float32."""
    found: int = struct.unpack("i", struct.pack("f", scale))[0]
    return found


def takes_as_written(rows: Tensor) -> bool:
    """True for a bfloat16 matrix that products read as a neuron wrote it: rows without holes, of whole loads."""
    return rows.is_contiguous() and rows.shape[1] % _UNITS[-1] == 0 and _aligned(rows)


def _tile_over_rows(N: int, K: int, parts: int, device: torch.device) -> Tile:
    return tile_for("weights", N, K, parts, device)


def _three(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors for a kernel, which reads as many as there are."""
    last = grads[-1]
    return grads[0], grads[1] if len(grads) > 1 else last, grads[2] if len(grads) > 2 else last


def _dense_rows(x: Tensor) -> Tensor:
    """`x` with rows without holes."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0


def _unit(x: Tensor) -> int:
    """Numbers that one load takes, of which each row is a multiple and at which each row begins."""
    unit = _ALIGNMENT // x.dtype.itemsize
    return unit if _aligned(x) and x.shape[1] % unit == 0 and x.stride(0) % unit == 0 else 1


def _row_unit(x: Tensor) -> int:
    """The same of bfloat16 rows without holes: a whole chunk, a whole load, or one number."""
    return next((unit for unit in _UNITS if _aligned(x) and x.shape[1] % unit == 0), 1)


@functools.cache
def _kernels() -> Any:
    """The module of kernels, which imports Triton."""
    from flexsn_codegen.targets.triton.device import _products

    return _products
