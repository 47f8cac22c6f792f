"""How a recurrent loop is divided among the programs of one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flexsn_codegen.recurrent import Loop, Multiply, NotOneLaunchError, Tiles
from flexsn_runtime._availability import triton_interpreted

_ROWS = (16, 32, 64)
_COLUMNS = (16, 32, 64, 128)


def tiles_for(loop: Loop, device: torch.device, *, from_zero: bool) -> Tiles:
    """The tiles of a loop on a device.

    Raises:
        NotOneLaunchError: no program has room for its part of the matrices.
    """
    if triton_interpreted():
        return Tiles(16, 1, 32, 4)  # one program after the other: none may wait
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_block_optin
    tiles = _best(loop.num_rows, loop.width, _weights(loop, from_zero), properties.multi_processor_count, shared)
    if tiles is None:
        raise NotOneLaunchError(f"columns of its matrices do not fit into the {shared >> 10} KiB of a program")
    return tiles


@dataclass(frozen=True, slots=True)
class _Weight:
    """A piece of a product: padded terms of its sums, its columns, and bytes of a number of matrix and operand."""

    terms: int
    columns: int
    matrix: int
    operand: int


def _weights(loop: Loop, from_zero: bool) -> tuple[_Weight, ...]:
    exchanges = {exchange.port: exchange for exchange in loop.exchanges}
    found = []
    for part in loop.parts:
        if isinstance(part, Multiply):
            exchange = exchanges[part.operand.port]
            terms = max(16, 1 << (part.operand.width - 1).bit_length())
            matrix = 6 if exchange.dtype == torch.float32 else 2
            operand = 2 * exchange.parts(from_zero=from_zero)
            found += [_Weight(terms, count, matrix, operand) for _, count in part.pieces]
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _best(rows: int, width: int, weights: tuple[_Weight, ...], processors: int, shared: int) -> Tiles | None:
    """The tiles that need the fewest turns; of these, small ones: many small programs beat few large ones."""
    float32 = any(weight.matrix == 6 for weight in weights)
    largest = max(weight.terms for weight in weights)
    # As measured on an H200 (benchmarks/results/recurrence.md).
    chunk = 128 if largest > 512 or (float32 and largest > 256) else 512
    num_warps = 8 if float32 and largest > 256 else 4
    found: list[tuple[int, int, int, Tiles]] = []
    # More rows of operands in three parts do not fit into registers.
    for height in _ROWS if not float32 or largest <= 256 else _ROWS[:1]:
        for columns in _COLUMNS:
            if columns > 16 and columns >= 2 * width:
                continue
            count = -(-width // columns)
            tiles = Tiles(height, count, chunk, num_warps)
            bytes_ = sum(weight.terms * tiles.columns(weight.columns) * weight.matrix for weight in weights)
            # Of an operand in three parts, two chunks are there at a time, of others all.
            bytes_ += max(
                height * (weight.terms if weight.operand == 2 else min(weight.terms, 2 * chunk)) * weight.operand
                for weight in weights
            )
            if bytes_ > shared or count > processors:
                continue
            groups = -(-rows // height)
            turns = -(-groups // (processors // count))
            found.append((turns, height, columns, tiles))
    return min(found, key=lambda one: one[:3])[-1] if found else None
