"""Launches the kernels of `flexsn_codegen.targets.triton.device._moments`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_codegen.targets.triton import accumulator
from flexsn_runtime.launches._written_kernels import run_kernel

# Numbers of a tile: 8 for each thread, 16 bytes of half precision.
_TILE = 1024
_NUM_WARPS = 4
# Channels that a program reads side by side where they lie so: 128 bytes of half precision.
_MOST_COLUMNS = 64
_MOST_PLACES = 1024
# Programs for each multiprocessor, which runs as many at a time.
_PROGRAMS = 4
# Above, the last kernel's parts fill the registers of more warps.
_FEW_PARTS = 128
# The last kernel loads what all of them found at once.
_MOST_PARTS = 512
_FINISHED = 16


class Running(NamedTuple):
    """Running statistics that are moved by those of a batch.

    Attributes:
        mean, var: `[C]` float32.
        momentum: share of the batch.
        tracked: int64, a counter of batches; `None`: there is none.
    """

    mean: Tensor
    var: Tensor
    momentum: float
    tracked: Tensor | None = None


def moments(x: Tensor, running: Running | None) -> tuple[Tensor, Tensor]:
    """Mean and variance `[C]` of `x [N, C, ...]`, over at least two numbers of each channel."""
    channels = x.shape[1]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = x.numel() // channels
    last = x.movedim(1, -1)
    if last.is_contiguous():
        parts, first = _of_rows(last, count, kind), 1
    else:
        x = x.contiguous()
        parts, first = _of_planes(x, kind), count // x.shape[0]
    mean, var = (torch.empty(channels, dtype=kind, device=x.device) for _ in range(2))
    moved = Running(mean, var, 0.0) if running is None else running
    tracked = moved.tracked
    width = min(_FINISHED, _power(channels))
    run_kernel(
        _kernels().finish_kernel,
        (-(-channels // width),),
        (parts, x, mean, var, moved.mean, moved.var, mean if tracked is None else tracked),
        (len(parts), channels, first, count, float(moved.momentum)),
        (running is not None, tracked is not None, _power(len(parts)), width, accumulator(kind)),
        num_warps=4 if len(parts) <= _FEW_PARTS else 8,
    )
    return mean, var


def _of_rows(x: Tensor, rows: int, kind: torch.dtype) -> Tensor:
    columns = x.shape[-1]
    width = min(_MOST_COLUMNS, _power(columns))
    height = max(_TILE // width, 1)
    across = -(-columns // width)
    programs, tiles = _shared(-(-rows // height), across, x.device)
    parts = torch.empty(programs, 3, columns, dtype=kind, device=x.device)
    constants = (height, width, accumulator(kind))
    numbers = (rows, columns, tiles)
    run_kernel(_kernels().rows_kernel, (programs, across), (x, parts), numbers, constants, _warps(height * width))
    return parts


def _of_planes(x: Tensor, kind: torch.dtype) -> Tensor:
    samples, channels = x.shape[:2]
    size = x.numel() // (samples * channels)
    width = min(_MOST_PLACES, _power(size), _TILE)
    height = min(max(_TILE // width, 1), _power(samples))
    programs, tiles = _shared(-(-samples // height) * -(-size // width), channels, x.device)
    parts = torch.empty(programs, 3, channels, dtype=kind, device=x.device)
    constants = (height, width, accumulator(kind))
    numbers = (samples, channels, size, tiles)
    run_kernel(_kernels().planes_kernel, (channels, programs), (x, parts), numbers, constants, _warps(height * width))
    return parts


def _shared(tiles: int, beside: int, device: torch.device) -> tuple[int, int]:
    """How many programs share tiles, and how many tiles each of them reads.

    Args:
        beside: programs that work on others.
    """
    ahead = _kernels().AHEAD
    groups = -(-tiles // ahead)
    wanted = min(_MOST_PARTS, max(1, _PROGRAMS * _multiprocessors(device) // beside))
    each = -(-groups // min(wanted, groups))
    return -(-groups // each), each * ahead


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _warps(elements: int) -> int:
    return max(1, min(_NUM_WARPS, elements // 32))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _kernels() -> Any:
    """The module of kernels, which imports Triton."""
    from flexsn_codegen.targets.triton.device import _moments

    return _moments
