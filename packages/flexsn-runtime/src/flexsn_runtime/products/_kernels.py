"""Kernels of products with spikes, prepared for given sizes. Each kernel takes its tensors as one sequence.

The argument `aligned` contains True for each tensor whose address is a multiple of 16 bytes. Triton compiles separate
kernels for such tensors.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import PreparedKernel
from flexsn_runtime.products._tiles import CHECKED_ROWS, Tile

Aligned = tuple[bool, ...]

# Maximum number of programs of a kernel that repairs results. Such a kernel usually has no work.
_REPAIRERS = 128
_REPAIR_TILE = 64
_SEEN = 1024
_GROUP = 8
# Possible numbers of elements that one load reads from a row. The length of a row must be a multiple of this number.
_UNITS = (64, 8)
_ALIGNMENT = 16
# Stores the kernels for the sizes of recent calls.
_sizes = functools.lru_cache(maxsize=256)


@_sizes
def splitting(rows: int, columns: int, row: int, parts: int, aligned: Aligned, device: torch.device) -> PreparedKernel:
    """Prepares the kernel that splits `x` into `pieces`. The rows of `x` are `row` elements apart."""
    unit = unit_of(columns, row, aligned[0])
    padded = padded_units(columns)
    block = (16, 64) if triton_interpreted() else (16, 128)
    grid = (-(-rows // block[0]), -(-padded * padding() // block[1]))
    numbers = (rows, columns // unit, row // unit, padded, parts, unit, *block)
    return PreparedKernel(_import_kernels().split_kernel, grid, numbers, device)


@_sizes
def narrowing(M: int, K: int, row: int, scale: float, aligned: Aligned, device: torch.device) -> PreparedKernel:
    """Prepares the kernel that converts `s` to `spikes` and writes `seen`. The rows of `s` are `row` elements apart."""
    unit = unit_of(K, row, aligned[0])
    numbers = (M, K // unit, row // unit, padded_units(K), bits(scale))
    constants = (scale != 1.0, unit, CHECKED_ROWS, 64 if triton_interpreted() else 256)
    return PreparedKernel(_import_kernels().narrow_kernel, (-(-M // CHECKED_ROWS),), (*numbers, *constants), device)


@_sizes
def multiplying(
    M: int,
    N: int,
    row: int,
    padded: int,
    parts: int,
    bias: bool,
    scale: float,
    tile: Tile,
    aligned: Aligned,
    device: torch.device,
) -> PreparedKernel:
    """Prepares the kernel that computes `y`. The kernel takes `spikes`, `pieces`, a bias, and `y`.

    The rows of `spikes` have `row` elements, and the rows of `pieces` have `padded` units. Without a bias, any tensor
    may take the place of the bias.
    """
    unit = row_unit(row, aligned[0])
    numbers = (M, N, row // unit, padded, bits(scale))
    constants = (scale != 1.0, unit, parts, bias, tile.rows, tile.columns, tile.chunk, _GROUP, tile.leaves, tile.held)
    grid = (-(-M // tile.rows) * -(-N // tile.columns),)
    return PreparedKernel(
        _import_kernels().outputs_kernel, grid, (*numbers, *constants), device, tile.num_warps, tile.stages
    )


@_sizes
def repairing_outputs(
    M: int, N: int, K: int, row: int, bias: bool, aligned: Aligned, device: torch.device
) -> PreparedKernel:
    """Prepares the kernel that computes rows of `y` again.

    The kernel takes `s`, the dense weight, a bias, `y` and `seen`. The rows of `s` are `row` elements apart. Without a
    bias, any tensor may take the place of the bias.
    """
    programs = min(_REPAIRERS, -(-M // CHECKED_ROWS) * -(-N // _REPAIR_TILE))
    numbers = (M, N, K, row, bias, CHECKED_ROWS, _REPAIR_TILE, 16, _SEEN)
    return PreparedKernel(_import_kernels().repair_outputs_kernel, (programs,), numbers, device, stages=2)


@_sizes
def summing_rows(
    M: int,
    N: int,
    K: int,
    g_row: int,
    s_row: int,
    parts: int,
    tile: Tile,
    shares: int,
    aligned: Aligned,
    device: torch.device,
) -> PreparedKernel:
    """Prepares the kernel that computes the weight's gradient.

    The kernel takes three parts of the output's gradient, `spikes`, and the result `[shares, N, K]`.
    """
    g_unit, s_unit = row_unit(g_row, aligned[0]), row_unit(s_row, aligned[1])
    numbers = (M, N, K, g_row // g_unit, s_row // s_unit)
    constants = (g_unit, s_unit, parts, tile.rows, tile.columns, tile.chunk, tile.held)
    grid = (tiles_of(N, K, tile), shares)
    return PreparedKernel(
        _import_kernels().weights_kernel, grid, (*numbers, *constants), device, tile.num_warps, tile.stages
    )


@_sizes
def adding_shares(count: int, shares: int, scale: float, device: torch.device) -> PreparedKernel:
    """Prepares the kernel that adds up shares.

    The kernel takes the shares, `[shares, count]`, and the result, `[count]`. Both tensors may have the same address.
    """
    size = 1024
    numbers = (count, shares, bits(scale), scale != 1.0, size)
    return PreparedKernel(_import_kernels().shares_kernel, (-(-count // size),), numbers, device)


@_sizes
def repairing_weights(
    M: int,
    N: int,
    K: int,
    g_row: int,
    s_row: int,
    parts: int,
    dtype: torch.dtype,
    count: int,
    aligned: Aligned,
    device: torch.device,
) -> PreparedKernel:
    """Prepares the kernel that computes parts of the weight's gradient again.

    The kernel takes three parts of the output's gradient in `dtype`, `s`, the dense gradient of the weight, and `seen`,
    which has `count` words.
    """
    programs = min(_REPAIRERS, -(-N // _REPAIR_TILE) * -(-K // _REPAIR_TILE))
    numbers = (M, N, K, g_row, s_row, count)
    constants = (parts, _REPAIR_TILE, _REPAIR_TILE, 16, _SEEN)
    return PreparedKernel(
        _import_kernels().repair_weights_kernel, (programs,), (*numbers, *constants), device, stages=2
    )


@_sizes
def leading_back(
    M: int,
    N: int,
    K: int,
    row: int,
    padded: int,
    g_parts: int,
    w_parts: int,
    tile: Tile,
    aligned: Aligned,
    device: torch.device,
) -> PreparedKernel:
    """Prepares the kernel that computes the gradient of `s`.

    The kernel takes three parts of the output's gradient, `pieces`, and the result. The rows of each part have `row`
    elements, and the rows of `pieces` have `padded` units.
    """
    unit = row_unit(row, aligned[0])
    numbers = (M, N, K, row // unit, padded)
    constants = (unit, g_parts, w_parts, tile.rows, tile.columns, tile.chunk, _GROUP, tile.leaves, tile.held)
    grid = (-(-M // tile.rows) * -(-K // tile.columns),)
    return PreparedKernel(
        _import_kernels().inputs_kernel, grid, (*numbers, *constants), device, tile.num_warps, tile.stages
    )


def tiles_of(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def padding() -> int:
    """Returns the number of elements of a unit. The rows of parts are padded to whole units."""
    elements: int = _import_kernels().PADDING
    return elements


def padded_units(columns: int) -> int:
    return -(-columns // padding())


def bits(scale: float) -> int:
    """Returns the 32 bits of a float32 as an integer."""
    integer: int = struct.unpack("i", struct.pack("f", scale))[0]
    return integer


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0


def unit_of(columns: int, row: int, aligned: bool) -> int:
    """Returns the number of float32 values that a load reads.

    This number divides the length of a row and the distance between the starts of two rows.
    """
    unit = _ALIGNMENT // 4
    return unit if aligned and columns % unit == 0 and row % unit == 0 else 1


def row_unit(row: int, aligned: bool) -> int:
    """Returns the number of bfloat16 values that a load reads from dense rows: a chunk, a whole load, or one value."""
    return next((unit for unit in _UNITS if aligned and row % unit == 0), 1)


def takes_as_written(rows: Tensor) -> bool:
    """True for a bfloat16 matrix that products can read as a neuron wrote it.

    Such a matrix is contiguous and aligned, and each of its rows consists of whole loads.
    """
    return rows.is_contiguous() and rows.shape[-1] % _UNITS[-1] == 0 and is_aligned(rows)


@functools.cache
def _import_kernels() -> Any:
    """Returns the module of kernels. Its import also imports Triton."""
    from flexsn_codegen.targets.triton.device import _products

    return _products
