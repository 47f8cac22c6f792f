"""Launches the kernels of `flexsn_codegen.targets.triton.device._pooling`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.targets.triton import accumulator
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._written_kernels import run_kernel
from flexsn_runtime.pooling._window import Window, codes_shape, is_channels_last, memory_format

_NUM_WARPS = 4
# Elements per program. For channels-last tensors, each thread has 8 elements, which are 16 bytes in half precision. For
# other tensors, each thread has 2 elements, so that neighbouring threads read neighbouring elements for any stride.
_TILES = {True: 1024, False: 512}
_INTERPRETED_TILE = 2048
_MOST_COLUMNS = {True: 64, False: 128}
_UNITS = (8, 4, 2, 1)

_Shape = tuple[int, int, int, int]


def maximum(x: Tensor, window: Window, *, codes: bool) -> tuple[Tensor, Tensor | None]:
    """Computes maxima of `x [N, C, H, W]` and, if `codes` is True, codes of their positions."""
    x, last = _make_dense(x)
    y = _allocate_result(x, window, last)
    position_codes = None
    if codes:
        position_codes = torch.empty(
            codes_shape(_unpack_shape(y), last, window.bits), dtype=torch.uint8, device=x.device
        )
    bits = window.bits if codes else 8
    numbers, units = _list_sizes(_unpack_shape(x), _unpack_shape(y), last)
    samples, channels, down, across = _unpack_shape(y)
    if last:
        rows, columns = _divide_up(samples * down * across, 8 // bits), channels
    else:
        rows, columns = _divide_up(samples * channels, 8 // bits) * down, across
    tile, grid = _choose_tiles(rows, columns, last)
    constants = (*window.numbers, last, *units, codes, bits, *tile, accumulator(x.dtype))
    tensors = (x, y, x if position_codes is None else position_codes)
    run_kernel(_import_kernels().maximum_kernel, grid, tensors, numbers, constants, _NUM_WARPS)
    return y, position_codes


def average(x: Tensor, window: Window, divisor: int, *, pads: bool) -> Tensor:
    """Computes averages of `x [N, C, H, W]`.

    Args:
        divisor: divisor of each sum; 0 to divide by the number of positions in the window of the sum.
        pads: True if positions in the padding count toward this number.
    """
    x, last = _make_dense(x)
    y = _allocate_result(x, window, last)
    numbers, units = _list_sizes(_unpack_shape(x), _unpack_shape(y), last)
    tile, grid = _choose_tiles(*_count_rows_and_columns(_unpack_shape(y), last), last)
    divisor = _find_divisor(window, divisor, pads=pads)
    constants = (*window.numbers[:6], last, *units, divisor, pads, *tile, accumulator(x.dtype))
    run_kernel(_import_kernels().average_kernel, grid, (x, y), numbers, constants, _NUM_WARPS)
    return y


def gradient(
    grad: Tensor,
    codes: Tensor | None,
    shape: _Shape,
    window: Window,
    divisor: int = 0,
    *,
    last: bool,
    pads: bool = True,
) -> Tensor:
    """Computes the gradient of an input of shape `shape`.

    Args:
        grad: gradient of the result.
        codes: codes from `maximum`; `None` for the gradient of `average`.
        divisor, pads: same as for `average`.
        last: True if the input was channels-last.
    """
    grad = grad.contiguous(memory_format=memory_format(last))
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format(last))
    numbers, units = _list_sizes(shape, _unpack_shape(grad), last)
    cells = (*shape[:2], _divide_up(shape[2], window.stride[0]), _divide_up(shape[3], window.stride[1]))
    tile, grid = _choose_tiles(*_count_rows_and_columns(cells, last), last)
    bits, divisor = (0, _find_divisor(window, divisor, pads=pads)) if codes is None else (window.bits, 0)
    constants = (*window.numbers, last, *units, bits, divisor, pads, *tile, accumulator(grad.dtype))
    tensors = (grad, grad if codes is None else codes, out)
    run_kernel(_import_kernels().gradient_kernel, grid, tensors, numbers, constants, _NUM_WARPS)
    return out


def _make_dense(x: Tensor) -> tuple[Tensor, bool]:
    last = is_channels_last(x)
    return (x if last else x.contiguous()), last


def _allocate_result(x: Tensor, window: Window, last: bool) -> Tensor:
    shape = (*x.shape[:2], *window.out_size(*x.shape[2:]))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(last))


def _unpack_shape(x: Tensor) -> _Shape:
    samples, channels, height, width = x.shape
    return samples, channels, height, width


def _divide_up(number: int, size: int) -> int:
    return -(-number // size)


def _find_divisor(window: Window, divisor: int, *, pads: bool) -> int:
    """Returns the common divisor of all windows; 0 if their divisors may differ."""
    return window.positions if not divisor and pads and not window.ceil else divisor


def _list_sizes(shape: _Shape, out: _Shape, last: bool) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Returns integer arguments of kernels.

    The first tuple contains the sizes of input and result, whose innermost sizes are counted in units. The second tuple
    contains the number of elements of a unit of the input and of the result.
    """
    samples, channels, height, width = shape
    if last:
        unit = _choose_unit(channels)
        return (samples, channels // unit, height, width, *out[2:]), (unit, 1)
    unit, of_out = _choose_unit(width), _choose_unit(out[3])
    return (samples * channels, 1, height, width // unit, out[2], out[3] // of_out), (unit, of_out)


def _choose_unit(number: int) -> int:
    return next(unit for unit in _UNITS if number % unit == 0)


def _count_rows_and_columns(shape: _Shape, last: bool) -> tuple[int, int]:
    """Returns the numbers of rows and columns that all programs process together."""
    samples, channels, height, width = shape
    return (samples * height * width, channels) if last else (samples * channels * height, width)


def _choose_tiles(rows: int, columns: int, last: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the numbers of rows and columns that a program processes, and the grid."""
    tile = _INTERPRETED_TILE if triton_interpreted() else _TILES[last]
    width = min(1 << (columns - 1).bit_length(), _MOST_COLUMNS[last])
    height = max(tile // width, 1)
    return (height, width), (_divide_up(rows, height), _divide_up(columns, width))


@functools.cache
def _import_kernels() -> Any:
    """Returns the module of kernels. Its import also imports Triton."""
    from flexsn_codegen.targets.triton.device import _pooling

    return _pooling
