"""Launches kernels of products with spikes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import run_kernel
from flexsn_runtime.products._tiles import CHECKED_ROWS, Tile, seen_size, shares_of, tile_for

# Programs of a kernel that usually finds nothing to do.
_REPAIRERS = 128
_REPAIR_TILE = 64
_SEEN = 1024


def split(x: Tensor, parts: int) -> Tensor:
    """`x [rows, columns]` float32 as the sum of `parts` bfloat16 tensors, `[parts, rows, padded columns]`."""
    x = _dense_rows(x)
    rows, columns = x.shape
    padding = _kernels().PADDING
    padded = -(-columns // padding)
    out = torch.empty(parts, rows, padded * padding, dtype=torch.bfloat16, device=x.device)
    unit = _unit(x)
    numbers = (rows, columns // unit, x.stride(0) // unit, padded)
    block_rows, block_columns = (16, 64) if triton_interpreted() else (16, 128)
    grid = (-(-rows // block_rows), -(-padded * padding // block_columns))
    _run("split_kernel", grid, (x, out), numbers, (parts, unit, block_rows, block_columns))
    return out


def narrow(s: Tensor) -> tuple[Tensor, Tensor]:
    """`s [M, K]` float32 in bfloat16, `[M, padded K]`, and a record that is not 0 for rows that are not whole there."""
    s = _dense_rows(s)
    M, K = s.shape
    padding = _kernels().PADDING
    padded = -(-K // padding)
    spikes = torch.empty(M, padded * padding, dtype=torch.bfloat16, device=s.device)
    seen = torch.empty(seen_size(M), dtype=torch.int32, device=s.device)
    unit = _unit(s)
    numbers = (M, K // unit, s.stride(0) // unit, padded)
    constants = (unit, CHECKED_ROWS, 64 if triton_interpreted() else 256)
    _run("narrow_kernel", (-(-M // CHECKED_ROWS),), (s, spikes, seen), numbers, constants)
    return spikes, seen


def outputs(
    s: Tensor, weight: Tensor, bias: Tensor | None, parts: int, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """`s W^T + b`, and the record of `narrow`. Rows that are not whole are multiplied in float32.

    Args:
        s: `[M, K]` float32.
        weight: `[N, K]` float32.
        parts: of the weight.
    """
    s, weight = _dense_rows(s), weight.contiguous()
    (M, K), N = s.shape, weight.shape[0]
    spikes, seen = narrow(s)
    y = product(spikes, weight, bias, parts, tile)
    programs = min(_REPAIRERS, -(-M // CHECKED_ROWS) * -(-N // _REPAIR_TILE))
    options = (bias is not None, CHECKED_ROWS, _REPAIR_TILE, 16)
    tensors = (s, weight, y if bias is None else bias.contiguous(), y, seen)
    _run("repair_outputs_kernel", (programs,), tensors, (M, N, K, s.stride(0)), options, stages=2)
    return y, seen


def product(spikes: Tensor, weight: Tensor, bias: Tensor | None, parts: int, tile: Tile | None = None) -> Tensor:
    """`s W^T + b` of spikes from `narrow`."""
    M, N = len(spikes), weight.shape[0]
    y = torch.empty(M, N, dtype=torch.float32, device=spikes.device)
    if tile is None:
        tile = tile_for("outputs", M, N, parts, spikes.device)
    pieces = split(weight, parts)
    numbers = (M, N, pieces.shape[2] // _kernels().PADDING)
    constants = (parts, bias is not None, tile.rows, tile.columns, tile.chunk, 8)
    grid = (-(-M // tile.rows) * -(-N // tile.columns),)
    added = y if bias is None else bias.contiguous()
    _run("outputs_kernel", grid, (spikes, pieces, added, y), numbers, constants, tile.num_warps, tile.stages)
    return y


def weight_gradient(grad: Tensor, pieces: Tensor, s: Tensor, seen: Tensor, tile: Tile | None = None) -> Tensor:
    """`g^T s`, `[N, K]`.

    Args:
        grad: `[M, N]` float32.
        pieces: of it, from `split`.
        s: `[M, K]` float32.
        seen: the record of `outputs`.
    """
    grad, s = _dense_rows(grad), _dense_rows(s)
    (M, N), K = grad.shape, s.shape[1]
    spikes, _ = narrow(s)
    total = product_over_rows(pieces, spikes, N, K, tile)
    programs = min(_REPAIRERS, -(-N // _REPAIR_TILE) * -(-K // _REPAIR_TILE))
    sizes = (M, N, K, grad.stride(0), s.stride(0), seen.numel())
    options = (_REPAIR_TILE, _REPAIR_TILE, 16, _SEEN)
    _run("repair_weights_kernel", (programs,), (grad, s, total, seen), sizes, options, stages=2)
    return total


def product_over_rows(pieces: Tensor, spikes: Tensor, N: int, K: int, tile: Tile | None = None) -> Tensor:
    """`g^T s`, `[N, K]`, of parts of `g` from `split` and spikes from `narrow`."""
    parts, M, _ = pieces.shape
    if tile is None:
        tile = tile_for("weights", N, K, parts, spikes.device)
    tiles = -(-N // tile.rows) * -(-K // tile.columns)
    shares = shares_of(tiles, -(-M // tile.chunk), spikes.device)
    out = torch.empty(shares, N, K, dtype=torch.float32, device=spikes.device)
    padding = _kernels().PADDING
    numbers = (M, N, K, pieces.shape[2] // padding, spikes.shape[1] // padding)
    constants = (parts, tile.rows, tile.columns, tile.chunk, shares)
    _run("weights_kernel", (tiles, shares), (pieces, spikes, out), numbers, constants, tile.num_warps, tile.stages)
    return out[0] if shares == 1 else out.sum(0)


def input_gradient(pieces: Tensor, weight: Tensor, parts: int, tile: Tile | None = None) -> Tensor:
    """`g W`, `[M, K]`.

    Args:
        pieces: of `g`, from `split`.
        weight: `[N, K]` float32.
        parts: of the weight.
    """
    (N, K), M = weight.shape, pieces.shape[1]
    of_weight = split(weight, parts)
    out = torch.empty(M, K, dtype=torch.float32, device=weight.device)
    most = max(parts, pieces.shape[0])
    if tile is None:
        tile = tile_for("inputs", M, K, most, weight.device)
    padding = _kernels().PADDING
    numbers = (M, N, K, pieces.shape[2] // padding, of_weight.shape[2] // padding)
    constants = (pieces.shape[0], parts, tile.rows, tile.columns, tile.chunk, 8)
    grid = (-(-M // tile.rows) * -(-K // tile.columns),)
    _run("inputs_kernel", grid, (pieces, of_weight, out), numbers, constants, tile.num_warps, tile.stages)
    return out


@functools.cache
def _kernels() -> Any:
    """The module of kernels, which imports Triton."""
    from flexsn_codegen.targets.triton.device import _products

    return _products


def _dense_rows(x: Tensor) -> Tensor:
    """`x` with rows without holes."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _unit(x: Tensor) -> int:
    """Numbers that one load takes, of which each row is a multiple and at which each row begins."""
    unit = 16 // x.dtype.itemsize
    aligned = x.data_ptr() % 16 == 0 and x.shape[1] % unit == 0 and x.stride(0) % unit == 0
    return unit if aligned else 1


def _run(
    name: str,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    num_warps: int = 4,
    stages: int = 1,
) -> None:
    run_kernel(getattr(_kernels(), name), grid, tensors, numbers, constants, num_warps, stages)
