"""Tile sizes of products with spikes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from flexsn_runtime._availability import triton_interpreted

Work = Literal["outputs", "weights", "inputs"]
_SMALL = 32  # size of a tile in the interpreter
# Number of rows that share one entry of the record.
CHECKED_ROWS = 16
# Additional entries of the record. A compiler treats sizes of 0 and 1 differently from other sizes.
_PADDING = 2
_MULTIPROCESSORS = 8  # assumed for a CPU, so that tests use several shares


class Tile(NamedTuple):
    """The part of a result that one program computes.

    Attributes:
        rows, columns: number of rows and number of columns of the tile.
        chunk: number of terms that are added before their sum is added to other sums in float32.
        num_warps, stages: settings of Triton.
        leaves: True to add chunks in float32; False to let the tensor core add all terms.
        shares: number of programs that share a sum over rows; 0 to let the device decide.
        held: True to keep the first factor of several products in registers.
    """

    rows: int
    columns: int
    chunk: int
    num_warps: int
    stages: int
    leaves: bool = True
    shares: int = 0
    held: bool = False


def tile_for(work: Work, rows: int, columns: int, terms: int, parts: int, device: torch.device) -> Tile:
    """Returns the fastest measured tile for a result of `rows` by `columns`, whose elements are sums of `terms` terms.

    Args:
        parts: number of parts of the operand that has more parts.
    """
    if triton_interpreted():
        return Tile(_SMALL, _SMALL, _SMALL, 4, 1, leaves=parts > 2 or work == "weights")
    has_few_tiles = -(-rows // 128) * -(-columns // 128) <= 2 * _count_multiprocessors(device)
    tile = _RULES[work](terms, parts, has_few_tiles)
    if rows <= 64:
        tile = tile._replace(rows=64)
    if columns <= 64:
        tile = tile._replace(columns=64)
    if tile.rows * tile.columns <= 64 * 64:
        tile = tile._replace(num_warps=4)
    of_rows = 1 if work == "outputs" else parts
    of_columns = 1 if work == "weights" else parts
    of_stage = 2 * tile.chunk * (tile.rows * of_rows + tile.columns * of_columns)
    return tile._replace(stages=max(1, min(tile.stages, _find_shared_memory(device) // of_stage)))


# Maximum number of terms of a sum that stays in the tensor core. The error of such a sum is at most 2.4e-6, like the
# error of two parts.
_STAYING_OUTPUTS, _STAYING_INPUTS = 2048, 1024


def _choose_outputs_tile(terms: int, parts: int, has_few_tiles: bool) -> Tile:
    if parts > 2:
        return Tile(128, 64, 32, 4, 3) if terms <= 512 else Tile(128, 128, 64, 8, 3)
    if terms > _STAYING_OUTPUTS:
        return Tile(128, 64, 64, 8, 3)
    return Tile(128, 128, 64 if has_few_tiles else 32, 8, 3, leaves=False)


def _choose_inputs_tile(terms: int, parts: int, has_few_tiles: bool) -> Tile:
    if parts > 2:
        return Tile(128, 64, 32, 8, 3) if has_few_tiles else Tile(64, 128, 32, 4, 3)
    if terms > _STAYING_INPUTS:
        return Tile(64, 128, 32, 4, 3)
    return Tile(128, 128, 64 if has_few_tiles else 32, 8, 3, leaves=False)


def _choose_weights_tile(terms: int, parts: int, has_few_tiles: bool) -> Tile:
    return Tile(128, 128, 64, 8, 3) if parts > 2 else Tile(64, 128, 64, 4, 3)


_RULES: dict[Work, Callable[[int, int, bool], Tile]] = {
    "outputs": _choose_outputs_tile,
    "weights": _choose_weights_tile,
    "inputs": _choose_inputs_tile,
}


def seen_size(rows: int) -> int:
    """Returns the length of the record of rows with spikes that bfloat16 cannot represent."""
    return (rows + CHECKED_ROWS - 1) // CHECKED_ROWS + _PADDING


def shares_of(tile: Tile, rows: int, columns: int, terms: int, device: torch.device) -> int:
    """Returns the number of programs that share each sum, so that all multiprocessors are busy in one round."""
    if tile.shares:
        return tile.shares
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    at_once = 1 if tile.num_warps > 4 else 2
    return max(1, min(at_once * _count_multiprocessors(device) // tiles, -(-terms // tile.chunk) // 4))


@functools.cache
def _count_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _find_shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin) - 2048
