"""Divides a recurrent loop among thread-block clusters, and decides whether to use clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from flexsn_codegen.recurrent import Loop, Multiply, NotOneLaunchError
from flexsn_codegen.targets.cuda import Cluster, ClusterNeeds, cluster_needs, why_no_nvrtc

_VARIABLE = "FLEXSN_CLUSTERS"
_LEAST_CAPABILITY = (9, 0)
_BLOCKS, _ROW_TILES = (4, 8, 16), (1, 2, 3, 4)
# Numbers of splits, from the fastest to the slowest. The first order is for matrices that are completely in registers,
# and the second for matrices that are partly in registers (benchmarks/results/cluster_divisions.md).
_SPLITS, _SPLITS_OF_PARTS = (2, 4, 1, 8), (4, 2, 8, 1)
_REGISTERS = 65536  # number of registers of one multiprocessor
_MOST_REGISTERS = 255  # maximum registers of one thread
_MOST_THREADS = 1024
_SHARED_BYTES = (227 << 10) - 1024  # shared memory of one block, without its barriers
_RESERVED = 2048  # bytes of shared memory that a block takes in addition to its dynamic part
# Maps the number of blocks in a cluster to the number of multiprocessors that no cluster uses. All blocks of a cluster
# run in one group of multiprocessors, and the groups of a GPU differ in size.
_SPARE = {4: 8, 8: 18, 16: 18}
# Maximum registers with matrices in a thread of eight rows. With more such registers, none are left for loads in
# flight, and spilled values are read in every step.
_MOST_OF_MATRICES = 192
# Bytes of matrices that a block reads again in every step. Above the first limit, clusters are slower than separate
# launches for each step. Up to the second limit, other work hides the reads.
_MOST_AWAY, _LITTLE = 256 << 10, 64 << 10
# Maximum columns of a step for which clusters are faster on an H100. For wider steps, clusters are faster only in
# forwards in which all rows run at the same time and each block holds all of its matrices. In half precision, clusters
# are faster only for steps with gates and few columns (benchmarks/results/clusters.md, cluster_divisions_h200.md). The
# three limits are for float32 values, for spikes, which are sent as bits, and for half precision.
_MOST_COLUMNS, _MOST_COLUMNS_OF_BITS, _MOST_COLUMNS_OF_HALF = 384, 512, 256


def clusters_are_enabled() -> bool:
    """False if `FLEXSN_CLUSTERS` is 0."""
    return os.environ.get(_VARIABLE, "1") != "0"


def why_no_clusters(device: torch.device) -> str | None:
    """Returns the reason why a GPU cannot run kernels with clusters; `None` if it can run them."""
    if not clusters_are_enabled():
        return f"{_VARIABLE} is 0"
    if device.type != "cuda" or torch.version.hip:
        return "only CUDA has clusters"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "this GPU has none"
    return why_no_nvrtc()


def clusters_for(loop: Loop, processors: int, *, from_zero: bool, backwards: bool = False) -> Iterator[Cluster]:
    """Yields the possible divisions of a loop, with the best division first.

    Better divisions need fewer turns, read fewer bytes of matrices again in each step, and have fewer rows. Of two
    otherwise equal divisions with all matrices in registers, the division with fewer blocks is better.

    Args:
        processors: number of multiprocessors of the GPU.
        from_zero: True if the carried values are zero before the first step.
        backwards: True if the loop runs from the last step to the first.
    """
    dtypes = {exchange.dtype for exchange in loop.exchanges}
    of_bits = all(exchange.parts(from_zero=from_zero) == 1 for exchange in loop.exchanges)
    if dtypes != {torch.float32} and not (_has_gates(loop) and loop.width <= _MOST_COLUMNS_OF_HALF):
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
        num_turns = turns(loop, cluster, processors, from_zero=from_zero)
        preference = num_turns, needs.away // _LITTLE, cluster.compact, -cluster.slots, cluster.row_tiles
        if cluster.held is None:
            return *preference, 0, cluster.blocks, _SPLITS.index(cluster.splits)
        # With more blocks, more of the matrices fit into registers, but each block receives whole operands.
        return *preference, 1, -cluster.blocks if of_bits else cluster.blocks, _SPLITS_OF_PARTS.index(cluster.splits)

    limit = most_turns(loop, from_zero=from_zero, backwards=backwards)
    if limit is not None:
        fitting = [
            cluster
            for cluster in fitting
            if turns(loop, cluster, processors, from_zero=from_zero) <= limit
            and not cluster_needs(loop, cluster, from_zero=from_zero).away
        ]
    yield from sorted(fitting, key=preferred)


def _has_gates(loop: Loop) -> bool:
    """True if a product has several adjacent matrices, such as those of gates, or is the gradient of such a product."""
    products = [part for part in loop.parts if isinstance(part, Multiply)]
    return any(len(part.pieces) > 1 or part.operand.width > loop.width for part in products)


def most_turns(loop: Loop, *, from_zero: bool, backwards: bool) -> int | None:
    """Returns the largest number of turns for which clusters are faster than other kernels; `None` without a limit."""
    of_bits = all(exchange.parts(from_zero=from_zero) == 1 for exchange in loop.exchanges)
    if loop.width <= (_MOST_COLUMNS_OF_BITS if of_bits else _MOST_COLUMNS):
        return None
    return 0 if backwards else 1


def division(loop: Loop, cluster: Cluster, *, from_zero: bool) -> Cluster | None:
    """Returns the division with as much of the matrices as possible in registers, and then in shared memory.

    If two slots for sent values leave too little room in shared memory, the division has one slot. If the matrices and
    values do not fit with one slot either, the result is `None`.
    """
    threads, tiles = cluster.threads(loop.width), cluster.tiles(loop.width) * cluster.blocks
    if threads > _MOST_THREADS or tiles % cluster.splits:
        return None
    try:
        cluster, needs = _hold_matrices(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES:
            cluster = replace(cluster, compact=True)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES and len(loop.exchanges) == 1:
            cluster = replace(cluster, slots=1)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
        if needs.shared > _SHARED_BYTES:
            cluster, needs = _hold_matrices(loop, replace(cluster, held=None, stored=0), from_zero=from_zero)
            num_stored = max(0, _SHARED_BYTES - needs.shared) // needs.shared_of_tile
            cluster = replace(cluster, stored=num_stored)
            needs = cluster_needs(loop, cluster, from_zero=from_zero)
    except NotOneLaunchError:
        return None
    return cluster if needs.shared <= _SHARED_BYTES and needs.away <= _MOST_AWAY else None


def _hold_matrices(loop: Loop, cluster: Cluster, *, from_zero: bool) -> tuple[Cluster, ClusterNeeds]:
    """Returns the division with as much of the matrices as possible in registers, and the memory that it needs."""
    needs = cluster_needs(loop, cluster, from_zero=from_zero)
    room = min(_count_registers(cluster.threads(loop.width)) - needs.others, _MOST_OF_MATRICES)
    if needs.matrices > room:
        cluster = replace(cluster, held=max(0, room // needs.registers_of_tile))
        needs = cluster_needs(loop, cluster, from_zero=from_zero)
    return cluster, needs


def _count_registers(threads: int) -> int:
    """Returns the number of registers that each thread of a block can have."""
    return min(_MOST_REGISTERS, _REGISTERS // threads // 8 * 8)


def turns(loop: Loop, cluster: Cluster, processors: int, *, from_zero: bool) -> int:
    """Estimates the number of turns in which clusters compute all rows. The driver later returns the exact number."""
    needs = cluster_needs(loop, cluster, from_zero=from_zero)
    threads = cluster.threads(loop.width)
    registers = min(_count_registers(threads), needs.matrices + needs.others)
    fits_twice = 2 * threads * registers <= _REGISTERS and 2 * (needs.shared + _RESERVED) <= _SHARED_BYTES
    clusters_at_once = 2 if fits_twice and cluster.blocks == max(_BLOCKS) else 1
    usable = processors - _SPARE.get(cluster.blocks, 0)
    groups = -(-loop.num_rows // cluster.rows)
    return -(-groups // max(1, clusters_at_once * (usable // cluster.blocks)))
