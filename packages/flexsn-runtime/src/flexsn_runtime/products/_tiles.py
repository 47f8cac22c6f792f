"""Sizes of tiles of products with spikes."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from flexsn_runtime._availability import triton_interpreted

Work = Literal["outputs", "weights", "inputs"]
_SMALL = 32  # for the interpreter
# Rows of which is recorded together whether they are whole.
CHECKED_ROWS = 16
# A compiler treats sizes of 0 and 1 apart from others: records of what is not whole are longer than needed.
_PADDING = 2
_MULTIPROCESSORS = 4  # of a device without any: tests go through several shares


class Tile(NamedTuple):
    """What one program computes.

    Attributes:
        rows, columns: of the result.
        chunk: terms of a sum between two additions in float32.
        num_warps, stages: of Triton.
        leaves: chunks are added in float32; otherwise all terms in the tensor core.
        shares: programs that share a sum over rows; 0: as many as keep the device busy.
    """

    rows: int
    columns: int
    chunk: int
    num_warps: int
    stages: int
    leaves: bool = True
    shares: int = 0


def tile_for(work: Work, rows: int, columns: int, terms: int, parts: int, device: torch.device) -> Tile:
    """The tile for a result of `rows` and `columns`, each a sum of `terms`.

    Args:
        parts: of the operand that has most.
    """
    if triton_interpreted():
        return Tile(_SMALL, _SMALL, _SMALL, 4, 1)
    chunk = 32 if work == "inputs" else 64
    across = 64 if columns <= 64 else 128
    down = 64 if rows <= 64 else 128
    warps = 8 if across * down > 64 * 128 else 4
    of_rows = 1 if work == "outputs" else parts
    of_columns = 1 if work == "weights" else parts
    of_stage = 2 * chunk * (down * of_rows + across * of_columns)
    stages = max(1, min(3, _shared_memory(device) // of_stage))
    return Tile(down, across, chunk, warps, stages)


def seen_size(rows: int) -> int:
    """The length of the record of which rows have spikes that are not whole in a bfloat16."""
    return (rows + CHECKED_ROWS - 1) // CHECKED_ROWS + _PADDING


def shares_of(tile: Tile, rows: int, columns: int, terms: int, device: torch.device) -> int:
    """The number of programs that share each sum, so that there are about two for each multiprocessor."""
    if tile.shares:
        return tile.shares
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    return max(1, min(2 * _multiprocessors(device) // tiles, -(-terms // tile.chunk) // 4))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin) - 2048
