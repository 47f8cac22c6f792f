"""Launches the kernels of `flexsn_codegen.targets.triton.device._pooling`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.targets.triton import accumulator
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import run_kernel
from flexsn_runtime.pooling._window import Window, codes_shape, is_channels_last, matrix, memory_format

_NUM_WARPS = 4
# Numbers of a program. Channels-last, 8 for each thread, 16 bytes of half precision; otherwise 2, so that threads that
# are neighbours read neighbours whatever the stride is.
_TILES = {True: 1024, False: 256}
_INTERPRETED_TILE = 2048
_MOST_CHANNELS = 64
_MOST_PIXELS = 256


def maximum(x: Tensor, window: Window, *, codes: bool) -> tuple[Tensor, Tensor | None]:
    """Maxima of `x [N, C, H, W]`, and codes that say where they are."""
    x, last = _dense(x)
    y = _pooled(x, window, last)
    found = None
    if codes:
        found = torch.empty(codes_shape(_four(y), last, window.bits), dtype=torch.uint8, device=x.device)
    rows, columns = matrix(_four(y), last)
    bits = window.bits if codes else 8
    tile, grid = _tiles(-(-rows * bits // 8), columns, last)
    numbers = (rows, columns, *x.shape[1:], *y.shape[2:])
    constants = (*window.numbers, last, codes, bits, *tile, accumulator(x.dtype))
    given = (x, y, x if found is None else found)
    run_kernel(_kernels().maximum_kernel, grid, given, numbers, constants, _NUM_WARPS)
    return y, found


def average(x: Tensor, window: Window, divisor: int, *, pads: bool) -> Tensor:
    """Averages of `x [N, C, H, W]`.

    Args:
        divisor: of each sum; 0: the number of positions of its window.
        pads: positions in the padding count.
    """
    x, last = _dense(x)
    y = _pooled(x, window, last)
    rows, columns = matrix(_four(y), last)
    tile, grid = _tiles(rows, columns, last)
    numbers = (rows, columns, *x.shape[1:], *y.shape[2:])
    constants = (*window.numbers[:6], last, divisor, pads, *tile, accumulator(x.dtype))
    run_kernel(_kernels().average_kernel, grid, (x, y), numbers, constants, _NUM_WARPS)
    return y


def gradient(
    grad: Tensor,
    codes: Tensor | None,
    shape: tuple[int, int, int, int],
    window: Window,
    divisor: int = 0,
    *,
    last: bool,
    pads: bool = True,
) -> Tensor:
    """The gradient of the input `shape` of a maximum with `codes`, or of an average.

    Args:
        grad: of the result.
        last: the input was channels-last.
    """
    grad = grad.contiguous(memory_format=memory_format(last))
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format(last))
    rows, columns = matrix(shape, last)
    tile, grid = _tiles(rows, columns, last)
    numbers = (rows, columns, *shape[1:], *grad.shape[2:])
    bits = 0 if codes is None else window.bits
    constants = (*window.numbers, last, bits, divisor, pads, *tile, accumulator(grad.dtype))
    given = (grad, grad if codes is None else codes, out)
    run_kernel(_kernels().gradient_kernel, grid, given, numbers, constants, _NUM_WARPS)
    return out


def _dense(x: Tensor) -> tuple[Tensor, bool]:
    last = is_channels_last(x)
    return (x if last else x.contiguous()), last


def _pooled(x: Tensor, window: Window, last: bool) -> Tensor:
    shape = (*x.shape[:2], *window.out_size(*x.shape[2:]))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(last))


def _four(x: Tensor) -> tuple[int, int, int, int]:
    samples, channels, height, width = x.shape
    return samples, channels, height, width


def _tiles(rows: int, columns: int, last: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a program, and the grid."""
    tile = _INTERPRETED_TILE if triton_interpreted() else _TILES[last]
    width = min(1 << (columns - 1).bit_length(), _MOST_CHANNELS if last else _MOST_PIXELS)
    height = max(tile // width, 1)
    return (height, width), (-(-rows // height), -(-columns // width))


@functools.cache
def _kernels() -> Any:
    """The module of kernels, which imports Triton."""
    from flexsn_codegen.targets.triton.device import _pooling

    return _pooling
