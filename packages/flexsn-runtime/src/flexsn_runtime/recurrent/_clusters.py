"""How a recurrent loop is divided among thread-block clusters, and where they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from flexsn_codegen.recurrent import Loop, NotOneLaunchError
from flexsn_codegen.targets.cuda import Cluster, ClusterNeeds, cluster_needs, why_no_nvrtc

_VARIABLE = "FLEXSN_CLUSTERS"
_LEAST_CAPABILITY = (9, 0)
_BLOCKS, _ROW_TILES = (4, 8, 16), (1, 2, 3, 4)
# In the order of their speed, with all of the matrices in registers and with a part of them
# (benchmarks/results/cluster_divisions.md).
_SPLITS, _SPLITS_OF_PARTS = (2, 4, 1, 8), (4, 2, 8, 1)
_REGISTERS = 65536  # of a processor
_MOST_REGISTERS = 255  # of a thread
_MOST_THREADS = 1024
_SHARED_BYTES = (227 << 10) - 1024  # of a block, without its barriers
_RESERVED = 2048  # of shared memory that a block takes beside its dynamic part
# Blocks of a cluster are on processors of one group, which not all groups have the most of.
_SPARE = {4: 8, 8: 18, 16: 18}
# Of the matrices in a thread of eight rows; more of them leave none for operands that are under way, and what is
# spilled is read in every step.
_MOST_OF_MATRICES = 192
# Of matrices that a block reads again in every step: more take longer than launches step by step, few come in time.
_MOST_AWAY, _LITTLE = 256 << 10, 64 << 10
# On an H100, of wider steps forwards of gates are faster than others, where all rows run at a time; those in half
# precision are slower (benchmarks/results/clusters.md, cluster_divisions.md). Spikes are sent as bits.
_MOST_COLUMNS, _MOST_COLUMNS_OF_BITS = 384, 512


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


def clusters_for(loop: Loop, processors: int, *, from_zero: bool, backwards: bool = False) -> Iterator[Cluster]:
    """The divisions of a loop, the best one first: all rows at a time where they fit, all of the matrices in a block,
    few rows, few blocks.

    Args:
        processors: of the GPU.
        from_zero: whether what is carried is zero before the first step.
        backwards: whether the loop goes from the last step to the first.
    """
    dtypes = {exchange.dtype for exchange in loop.exchanges}
    of_bits = all(exchange.parts(from_zero=from_zero) == 1 for exchange in loop.exchanges)
    if dtypes != {torch.float32}:
        return
    fitting = [
        cluster
        for row_tiles in _ROW_TILES
        for blocks in _BLOCKS
        for splits in _SPLITS
        if (cluster := division(loop, Cluster(blocks, splits, row_tiles), from_zero=from_zero)) is not None
    ]

    def preferred(cluster: Cluster) -> tuple[int, ...]:
        needs = cluster_needs(loop, cluster, from_zero=from_zero)
        in_turn = turns(loop, cluster, processors, from_zero=from_zero)
        few = in_turn, needs.away // _LITTLE, cluster.compact, -cluster.slots, cluster.row_tiles
        if cluster.held is None:
            return *few, 0, cluster.blocks, _SPLITS.index(cluster.splits)
        # More blocks hold more of the matrices, and each of them receives whole operands.
        return *few, 1, -cluster.blocks if of_bits else cluster.blocks, _SPLITS_OF_PARTS.index(cluster.splits)

    most = most_turns(loop, from_zero=from_zero, backwards=backwards)
    found = sorted((preferred(cluster), i) for i, cluster in enumerate(fitting))
    yield from (fitting[i] for (in_turn, *_), i in found if most is None or in_turn <= most)


def most_turns(loop: Loop, *, from_zero: bool, backwards: bool) -> int | None:
    """How many times in turn clusters may run to be faster than other ways; `None`: as often as it takes."""
    of_bits = all(exchange.parts(from_zero=from_zero) == 1 for exchange in loop.exchanges)
    if loop.width <= (_MOST_COLUMNS_OF_BITS if of_bits else _MOST_COLUMNS):
        return None
    return 0 if of_bits or backwards else 1


def division(loop: Loop, cluster: Cluster, *, from_zero: bool) -> Cluster | None:
    """A division with as much of the matrices in registers as has room there, then in shared memory, which has one slot
    for what is sent where two leave too little; `None`: it does not fit.
    """
    threads, tiles = cluster.threads(loop.width), cluster.tiles(loop.width) * cluster.blocks
    if threads > _MOST_THREADS or tiles % cluster.splits:
        return None
    try:
        cluster, needs = _held(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES:
            cluster = replace(cluster, compact=True)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES and len(loop.exchanges) == 1:
            cluster = replace(cluster, slots=1)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES:
            cluster, needs = _held(loop, replace(cluster, held=None, stored=0), from_zero=from_zero)
            stored = max(0, _SHARED_BYTES - needs.shared) // needs.shared_of_a_term
            cluster = replace(cluster, stored=stored)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
    except NotOneLaunchError:
        return None
    return cluster if needs.shared <= _SHARED_BYTES and needs.away <= _MOST_AWAY else None


def _held(loop: Loop, cluster: Cluster, *, from_zero: bool) -> tuple[Cluster, ClusterNeeds]:
    """The division with as much of the matrices in registers as has room there, and its needs."""
    needs = cluster_needs(loop, cluster, from_zero=from_zero)
    room = min(_of_a_thread(cluster.threads(loop.width)) - needs.others, _MOST_OF_MATRICES)
    if needs.matrices > room:
        cluster = replace(cluster, held=max(0, room // needs.of_a_term))
        needs = cluster_needs(loop, cluster, from_zero=from_zero)
    return cluster, needs


def _of_a_thread(threads: int) -> int:
    """Registers that each thread of a block can have."""
    return min(_MOST_REGISTERS, _REGISTERS // threads // 8 * 8)


def turns(loop: Loop, cluster: Cluster, processors: int, *, from_zero: bool) -> int:
    """An estimate of how many times in turn clusters run until all rows are done; the driver has the number later."""
    needs = cluster_needs(loop, cluster, from_zero=from_zero)
    threads = cluster.threads(loop.width)
    registers = min(_of_a_thread(threads), needs.matrices + needs.others)
    two = 2 * threads * registers <= _REGISTERS and 2 * (needs.shared + _RESERVED) <= _SHARED_BYTES
    of_a_processor = 2 if two and cluster.blocks == max(_BLOCKS) else 1
    together = processors - _SPARE.get(cluster.blocks, 0)
    groups = -(-loop.num_rows // cluster.rows)
    return -(-groups // max(1, of_a_processor * (together // cluster.blocks)))
