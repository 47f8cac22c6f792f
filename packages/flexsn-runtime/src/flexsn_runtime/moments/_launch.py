"""Launches the kernels of `flexsn_codegen.targets.triton.device._moments`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_codegen.targets.triton import accumulator
from flexsn_runtime.launches._written_kernels import run_kernel


class MomentTiles(NamedTuple):
    """Size of the tiles in which programs read a tensor, and launch settings for this size.

    Attributes:
        size: number of elements in a tile. A thread reads 8 of them, which are 16 bytes in half precision.
        num_warps: warps of a program.
        programs: number of programs per multiprocessor. A multiprocessor runs all of them at the same time.
    """

    size: int
    num_warps: int
    programs: int


# Times are in units of half of the time that a copy of the tensor takes. On an H100, 100 million contiguous bfloat16
# elements take 1.60 units with the large tiles and 1.83 units with the small tiles. 6 million elements take 2.78 units
# with the large tiles and 2.60 units with the small tiles.
_TILES = MomentTiles(1024, 4, 4)
_LARGE, _TILES_OF_LARGE = 2**23, MomentTiles(2048, 8, 2)
# Maximum number of adjacent channels that a program reads together if channels are the last dimension in memory. 64
# values are 128 bytes in half precision.
_MOST_COLUMNS = 64
_MOST_PLACES = 1024
# A part holds the count, mean and squared deviations of each channel over some of the tiles. With more parts than this,
# the last kernel needs the registers of 8 warps.
_FEW_PARTS = 128
# The last kernel loads all parts at once.
_MOST_PARTS = 512
_FINISHED = 16


class Running(NamedTuple):
    """Running statistics that a batch updates.

    Attributes:
        mean, var: tensors `[C]` in float32.
        momentum: weight of the batch in the update.
        tracked: counter of batches, int64; `None` if there is no counter.
    """

    mean: Tensor
    var: Tensor
    momentum: float
    tracked: Tensor | None = None


def moments(x: Tensor, running: Running | None) -> tuple[Tensor, Tensor]:
    """Returns mean and variance `[C]` of `x [N, C, ...]`, and updates `running`.

    Each channel must have at least two elements.
    """
    channels = x.shape[1]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = x.numel() // channels
    last = x.movedim(1, -1)
    if last.is_contiguous():
        parts, channel_stride = _reduce_rows(last, count, kind), 1
    else:
        x = x.contiguous()
        parts, channel_stride = _reduce_planes(x, kind), count // x.shape[0]
    mean, var = (torch.empty(channels, dtype=kind, device=x.device) for _ in range(2))
    running_moments = Running(mean, var, 0.0) if running is None else running
    tracked = running_moments.tracked
    width = min(_FINISHED, _find_next_power(channels))
    run_kernel(
        _import_kernels().finish_kernel,
        (-(-channels // width),),
        (parts, x, mean, var, running_moments.mean, running_moments.var, mean if tracked is None else tracked),
        (len(parts), channels, channel_stride, count, float(running_moments.momentum)),
        (running is not None, tracked is not None, _find_next_power(len(parts)), width, accumulator(kind)),
        num_warps=4 if len(parts) <= _FEW_PARTS else 8,
    )
    return mean, var


def _reduce_rows(x: Tensor, rows: int, kind: torch.dtype) -> Tensor:
    columns = x.shape[-1]
    width = min(_MOST_COLUMNS, _find_next_power(columns))
    tiles = _choose_tiles(x)
    height = max(tiles.size // width, 1)
    across = -(-columns // width)
    programs, tiles_per_program = _share_tiles(-(-rows // height), across, x.device, tiles)
    parts = torch.empty(programs, 3, columns, dtype=kind, device=x.device)
    constants = (height, width, accumulator(kind))
    numbers = (rows, columns, tiles_per_program)
    warps = _choose_warps(height * width, tiles)
    run_kernel(_import_kernels().rows_kernel, (programs, across), (x, parts), numbers, constants, warps)
    return parts


def _reduce_planes(x: Tensor, kind: torch.dtype) -> Tensor:
    samples, channels = x.shape[:2]
    size = x.numel() // (samples * channels)
    tiles = _choose_tiles(x)
    width = min(_MOST_PLACES, _find_next_power(size), tiles.size)
    height = min(max(tiles.size // width, 1), _find_next_power(samples))
    programs, tiles_per_program = _share_tiles(-(-samples // height) * -(-size // width), channels, x.device, tiles)
    parts = torch.empty(programs, 3, channels, dtype=kind, device=x.device)
    constants = (height, width, accumulator(kind))
    numbers = (samples, channels, size, tiles_per_program)
    warps = _choose_warps(height * width, tiles)
    run_kernel(_import_kernels().planes_kernel, (channels, programs), (x, parts), numbers, constants, warps)
    return parts


def _share_tiles(tiles: int, num_others: int, device: torch.device, by: MomentTiles) -> tuple[int, int]:
    """Returns the number of programs that share the tiles, and the number of tiles per program.

    Args:
        num_others: size of the other dimension of the grid. Programs at different indices of this dimension share
            different tiles.
    """
    loads_ahead = _import_kernels().AHEAD
    groups = -(-tiles // loads_ahead)
    num_parts = min(_MOST_PARTS, max(1, by.programs * _count_multiprocessors(device) // num_others))
    tiles_per_program = -(-groups // min(num_parts, groups))
    return -(-groups // tiles_per_program), tiles_per_program * loads_ahead


def _find_next_power(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _choose_tiles(x: Tensor) -> MomentTiles:
    return _TILES_OF_LARGE if x.numel() >= _LARGE else _TILES


def _choose_warps(elements: int, tiles: MomentTiles) -> int:
    return max(1, min(tiles.num_warps, elements // 32))


@functools.cache
def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _import_kernels() -> Any:
    """Returns the module of kernels. Its import also imports Triton."""
    from flexsn_codegen.targets.triton.device import _moments

    return _moments
