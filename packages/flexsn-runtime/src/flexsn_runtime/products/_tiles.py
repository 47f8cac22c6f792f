"""Sizes of tiles of products with spikes."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from flexsn_runtime._availability import triton_interpreted

Work = Literal["outputs", "weights", "inputs"]
_SMALL = 32  # for the interpreter
# A compiler treats sizes of 0 and 1 apart from others: records of what is not whole are longer than needed.
_PADDING = 2
_MULTIPROCESSORS = 4  # of a device without any: tests go through several shares


class Tile(NamedTuple):
    """What one program computes.

    Attributes:
        rows, columns: of the result.
        chunk: terms of a sum between two additions in float32.
        num_warps, stages: of Triton.
    """

    rows: int
    columns: int
    chunk: int
    num_warps: int
    stages: int


def tile_for(work: Work, rows: int, columns: int, parts: int, spike_bytes: int, device: torch.device) -> Tile:
    """The tile for a result of `rows` and `columns`.

    Args:
        parts: of the operand that has most.
        spike_bytes: of one number of the spikes, which have one part.
    """
    if triton_interpreted():
        return Tile(_SMALL, _SMALL, _SMALL, 4, 1)
    chunk = 32
    across = 64 if columns <= 64 else 128
    down = 128
    warps = 8 if across * down > 64 * 128 else 4
    own = 2 * parts if work == "inputs" else spike_bytes
    of_stage = chunk * (down * own + across * 2 * parts)
    stages = max(1, min(4, _shared_memory(device) // of_stage))
    return Tile(down, across, chunk, warps, stages)


def seen_size(rows: int) -> int:
    """The length of the record of which rows have spikes that are not whole in a bfloat16."""
    together = checked_rows()
    return (rows + together - 1) // together + _PADDING


def checked_rows() -> int:
    """The number of rows of which is recorded together whether they are whole; divides those of each tile."""
    return _SMALL // 2 if triton_interpreted() else 64


def shares_of(tiles: int, chunks: int, device: torch.device) -> int:
    """The number of programs that share a sum over `chunks`, so that there are about two for each multiprocessor."""
    return max(1, min(2 * _multiprocessors(device) // tiles, chunks // 4))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin) - 2048
