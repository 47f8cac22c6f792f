"""How a recurrent loop is divided among thread-block clusters, and where they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from flexsn_codegen.recurrent import Loop, Multiply
from flexsn_codegen.targets.cuda import Cluster, why_no_nvrtc

_VARIABLE = "FLEXSN_CLUSTERS"
_LEAST_CAPABILITY = (9, 0)
# Splits in the order of their speed where they spill nothing (benchmarks/results/cluster_divisions.md).
_BLOCKS, _SPLITS, _ROW_TILES = (4, 8, 16), (2, 4, 1, 8), (1, 2, 4)
_REGISTERS = 65536  # of a processor
_MOST_REGISTERS = 255  # of a thread
_OTHER_REGISTERS = 60  # of a thread, beside the matrices
_FEWEST_REGISTERS = 40  # of a thread, of which the matrices take none
_MOST_THREADS = 1024
# Blocks of a cluster are on processors of one group, which not all groups have the most of.
_SMALL, _SPARE = 4, 18
# Of the matrices in a thread of eight rows; more of them leave none for operands that are under way, and what is
# spilled is read in every step.
_MOST_OF_MATRICES = 192
# Wider steps, and those in half precision, are faster in programs that exchange through global memory, on an H100
# (benchmarks/results/clusters.md, cluster_divisions.md).
_MOST_COLUMNS = 256


def clusters_wanted() -> bool:
    """False where `FLEXSN_CLUSTERS` is 0."""
    return os.environ.get(_VARIABLE, "1") != "0"


def why_no_clusters(device: torch.device) -> str | None:
    """The reason why a GPU runs no kernels in clusters; `None`: it does."""
    if not clusters_wanted():
        return f"{_VARIABLE} is 0"
    if device.type != "cuda" or torch.version.hip:
        return "only CUDA has clusters"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "this GPU has none"
    return why_no_nvrtc()


def clusters_for(loop: Loop, processors: int) -> Iterator[Cluster]:
    """The divisions of a loop, the best one first: all rows at a time where they fit, few rows, few blocks.

    Args:
        processors: of the GPU.
    """
    dtypes = {exchange.dtype for exchange in loop.exchanges}
    if loop.width > _MOST_COLUMNS or dtypes != {torch.float32}:
        return
    fitting = [
        Cluster(blocks, splits, row_tiles)
        for row_tiles in _ROW_TILES
        for blocks in _BLOCKS
        for splits in _SPLITS
        if _fits(loop, Cluster(blocks, splits, row_tiles))
    ]
    yield from sorted(fitting, key=lambda cluster: (_turns(loop, cluster, processors), cluster.row_tiles))


def _turns(loop: Loop, cluster: Cluster, processors: int) -> int:
    """An estimate of how many times in turn clusters run until all rows are done; the driver has the number later."""
    threads = cluster.threads(loop.width)
    registers = min(_MOST_REGISTERS, 2 * matrix_registers(loop, cluster) + _FEWEST_REGISTERS)
    of_a_processor = max(1, _REGISTERS // (threads * registers))
    together = processors - (_SPARE if cluster.blocks > _SMALL else 0)
    groups = -(-loop.num_rows // cluster.rows)
    return -(-groups // max(1, of_a_processor * (together // cluster.blocks)))


def matrix_registers(loop: Loop, cluster: Cluster) -> int:
    """32-bit numbers of the matrices in a thread."""
    total = 0
    dtypes = {exchange.port: exchange.dtype for exchange in loop.exchanges}
    tiles = cluster.tiles(loop.width) * cluster.blocks
    for part in loop.parts:
        if isinstance(part, Multiply):
            parts = 3 if dtypes[part.operand.port] == torch.float32 else 1
            terms = -(-part.operand.width // loop.width) * tiles / cluster.splits
            total += int(len(part.pieces) * terms * parts * 4)
    return total


def _fits(loop: Loop, cluster: Cluster) -> bool:
    threads, tiles = cluster.threads(loop.width), cluster.tiles(loop.width) * cluster.blocks
    if threads > _MOST_THREADS or tiles % cluster.splits:
        return False
    room = min(_MOST_REGISTERS, _REGISTERS // threads) - _OTHER_REGISTERS
    return matrix_registers(loop, cluster) <= min(room, _MOST_OF_MATRICES // cluster.row_tiles)
