"""Divides a recurrent loop among the programs of one launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flexsn_codegen.recurrent import Loop, Multiply, NotOneLaunchError
from flexsn_codegen.targets.triton._recurrent import Tiles
from flexsn_runtime._availability import triton_interpreted

_ROWS = (16, 32, 64)
_COLUMNS = (16, 32, 64, 128)
_OPERAND_BYTES = 512  # maximum bytes of operands in a thread, which take half of the registers
# Maximum bytes of the matrices of a program with all columns. These bytes take half of the registers of a
# multiprocessor. This limit and the other choices of `held_tiles` are measured by benchmarks/recurrence_tiles.py.
_HELD_BYTES = 128 << 10
_HELD_BY_FOUR_WARPS = 24 << 10
_HELD_ROWS = 8
# Maximum bytes of all matrices that are multiplied by float32 values in three parts, for a step with one matrix and for
# a step with gates. A library multiplies by larger matrices. Measured for a GRU of 512 neurons, whose matrices have 4.5
# MiB, and for a LIF of 1024 neurons (benchmarks/results/clusters.md). The matrices of two populations of 512 and 128
# neurons have 2.2 MiB. These populations take 97 ms step by step, and 10 ms in one launch.
_MOST_OF_PARTS, _MOST_OF_GATES = 5 << 20, 4 << 20
# Limits for float32 steps that read more than `_FEW_SHIFTED` values of earlier steps, or that store such values in
# memory. On an H100, an operand in parts does not fit into registers, unless it is multiplied in chunks. If the values
# of earlier steps are in memory, fewer registers are spilled with more warps.
_FEW_SHIFTED = 8
_SHIFTED_CHUNK = 128
_RING_CHUNK = 64
_RING_WARPS = 8
# Columns per warp and maximum columns of a program with whole rows and no matrices. A thread has eight columns of each
# value. A program has up to 16 warps.
_COLUMNS_OF_A_WARP = 256
_MOST_COLUMNS = 4096


def tiles_for(loop: Loop, device: torch.device, *, from_zero: bool) -> Iterator[Tiles]:
    """Yields the tiles of a loop on a device, with the best tiles first. Later tiles need fewer registers.

    Raises:
        NotOneLaunchError: no program has room for its part of the matrices.
    """
    if not loop.has_products:
        yield _choose_whole_rows(loop)
        return
    if triton_interpreted():
        # The interpreter runs programs one after the other, so no program may wait for another.
        exchanged = not loop.reduced or held_tiles(loop, 1, from_zero=from_zero) is None
        yield Tiles(16 if exchanged else _HELD_ROWS, 1, 32, 4, ahead=2, exchanged=exchanged)
        return
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = held_tiles(loop, processors, from_zero=from_zero)
    if tiles is not None:
        yield tiles
    elif _has_large_parts(loop, from_zero) and not (loop.ring or loop.shifted or loop.reduced):
        raise NotOneLaunchError(
            f"a library multiplies by float32 matrices of {loop.width} neurons faster than programs that exchange "
            "three parts of each number"
        )
    if tiles is None or not loop.reduced:
        yield from exchanged_tiles(loop, device, from_zero=from_zero)


def _choose_whole_rows(loop: Loop) -> Tiles:
    """Returns tiles of a loop without matrices: a program has one row, and a thread has a few columns of this row.

    Raises:
        NotOneLaunchError: the row is too long.
    """
    if loop.width > _MOST_COLUMNS:
        raise NotOneLaunchError(f"a row of {loop.width} columns does not fit into one program")
    warps = max(1, (1 << (loop.width - 1).bit_length()) // _COLUMNS_OF_A_WARP)
    return Tiles(1, 1, 16, warps, ahead=1, exchanged=False)


def held_tiles(loop: Loop, processors: int, *, from_zero: bool) -> Tiles | None:
    """Returns tiles with all columns, and with the matrices in registers; `None` if the matrices do not fit.

    Args:
        processors: number of multiprocessors. If there are more programs than multiprocessors, several programs share a
            multiprocessor, provided that the multiprocessor has enough registers. It has enough for programs of four
            warps.
    """
    matrices = sum(weight.held_bytes for weight in _list_weights(loop, from_zero))
    if matrices > _HELD_BYTES:
        return None
    shared = loop.num_rows > _HELD_ROWS * processors and matrices < _HELD_BYTES
    num_warps = 4 if shared or matrices <= _HELD_BY_FOUR_WARPS else 8
    return Tiles(_HELD_ROWS, 1, 512, num_warps, ahead=1, exchanged=False)


def exchanged_tiles(loop: Loop, device: torch.device, *, from_zero: bool) -> Iterator[Tiles]:
    """Yields tiles whose programs share rows and exchange values; see `tiles_for`."""
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_block_optin
    float32 = any(exchange.dtype == torch.float32 for exchange in loop.exchanges)
    reduced_sizes = tuple((width, dtype.itemsize) for width, dtype in loop.reduced.values())
    weights = _list_weights(loop, from_zero)
    tiles = _choose_tiles(loop.num_rows, loop.width, weights, reduced_sizes, properties.multi_processor_count, shared)
    if tiles is not None and loop.ring and float32:
        tiles = replace(tiles, chunk=min(tiles.chunk, _RING_CHUNK), num_warps=_RING_WARPS, ahead=1)
    elif tiles is not None and len(loop.shifted) > _FEW_SHIFTED and float32:
        tiles = replace(tiles, chunk=min(tiles.chunk, _SHIFTED_CHUNK), ahead=1)
    if tiles is None:
        rows = ", or rows that are reduced into its registers" if reduced_sizes else ""
        raise NotOneLaunchError(f"columns of its matrices do not fit into the {shared >> 10} KiB of a program{rows}")
    yield tiles
    for chunk in (tiles.chunk // 2, tiles.chunk // 4):
        yield replace(tiles, chunk=chunk, ahead=1)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A piece of a product: terms of a sum, columns, and bytes per element of the matrix and of the operand."""

    terms: int
    columns: int
    matrix: int
    operand: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the matrix, with all columns."""
        padded = Tiles(16, 1, 16, 4, ahead=1)
        return padded.columns(self.terms) * padded.columns(self.columns) * self.matrix

    def shared_bytes(self, tiles: Tiles) -> int:
        """Bytes of the matrix in shared memory."""
        return sum(tiles.chunks(self.terms)) * tiles.columns(self.columns) * self.matrix

    def operand_bytes(self, tiles: Tiles) -> int:
        """Bytes of the parts of the operand that a program holds at the same time."""
        ahead = tiles.ahead if self.operand == 2 else 1
        return tiles.rows * sum(tiles.chunks(self.terms)[: ahead + 1]) * self.operand


def _list_weights(loop: Loop, from_zero: bool) -> tuple[_Weight, ...]:
    exchanges = {exchange.port: exchange for exchange in loop.exchanges}
    weights = []
    for part in loop.parts:
        if isinstance(part, Multiply):
            exchange = exchanges[part.operand.port]
            matrix = 6 if exchange.dtype == torch.float32 else 2
            operand = 2 * exchange.parts(from_zero=from_zero)
            weights += [_Weight(part.operand.width, count, matrix, operand) for _, count in part.pieces]
    return tuple(weights)


def _has_large_parts(loop: Loop, from_zero: bool) -> bool:
    """True if the matrices that multiply values in parts are so large that exchanging values does not pay off."""
    weights = [weight for weight in _list_weights(loop, from_zero) if weight.operand > 2]
    gates = len(weights) > 1 or any(weight.terms > loop.width for weight in weights)
    size = sum(weight.terms * weight.columns * weight.matrix for weight in weights)
    return size > (_MOST_OF_GATES if gates else _MOST_OF_PARTS)


@functools.lru_cache(maxsize=256)
def _choose_tiles(
    rows: int,
    width: int,
    weights: tuple[_Weight, ...],
    gathered: tuple[tuple[int, int], ...],
    processors: int,
    shared: int,
) -> Tiles | None:
    """Returns the tiles with the fewest rounds; `None` if no tiles fit. Prefers small tiles, because they are faster.

    Args:
        gathered: for values that programs exchange for reductions, the number of columns, and the bytes of a column.
    """
    float32 = any(weight.matrix == 6 for weight in weights)
    largest = max(weight.terms for weight in weights)
    # Measured on an H200 (benchmarks/results/recurrence.md).
    chunk = 128 if largest > 512 or (float32 and largest > 256) else 512
    if float32 and len(weights) > 1 and largest > 128:
        chunk = 64  # each piece has six sums
    in_parts = any(weight.operand > 2 for weight in weights)
    num_warps = 8 if float32 and largest > 256 and (in_parts or largest <= 512) else 4
    # The first choice loads whole operands ahead. Large float32 operands leave registers for the fewest rows only.
    heights = _ROWS if not float32 or largest <= 256 else _ROWS[:1]
    num_chunks = -(-largest // chunk)
    choices = [(num_chunks, heights, _COLUMNS), (1, _ROWS[:1], _COLUMNS[:1])]
    if float32 and largest > 512 and not in_parts:  # the matrices leave little room for operands
        choices.insert(0, (1, _ROWS, _COLUMNS))
    for ahead, some_heights, some_columns in choices:
        fitting: list[tuple[int, int, int, Tiles]] = []
        for height in some_heights:
            for columns in some_columns:
                if columns > 16 and columns >= 2 * width:
                    continue
                for least in (2 * height, 16) if columns > height else (16,):
                    tiles = Tiles(height, -(-width // columns), chunk, num_warps, ahead, least=least)
                    room = _OPERAND_BYTES * 32 * num_warps
                    is_gathered = all(
                        height * (1 << (n - 1).bit_length()) * max(4, size) <= room for n, size in gathered
                    )
                    if tiles.count <= processors and is_gathered and _fits(tiles, weights, shared):
                        groups = -(-rows // height)
                        fitting.append((-(-groups // (processors // tiles.count)), height, columns, tiles))
                        break
        if fitting:
            return min(fitting, key=lambda entry: entry[:3])[-1]
    return None


def _fits(tiles: Tiles, weights: tuple[_Weight, ...], shared: int) -> bool:
    """True if a program's matrices and operands fit into its memory."""
    matrices = sum(weight.shared_bytes(tiles) for weight in weights)
    operand = max(weight.operand_bytes(tiles) for weight in weights)
    in_one_part = max((weight.operand_bytes(tiles) for weight in weights if weight.operand == 2), default=0)
    return matrices + operand <= shared and in_one_part <= _OPERAND_BYTES * 32 * tiles.num_warps
