"""Launch choices on the CPU, by size of the step."""

from __future__ import annotations

from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, limited

# By measurements with LIF on an EPYC with AVX2: in blocks of 4096 the loops over lanes are long, and a state is in the
# nearest cache. Four steps at a time pass through registers; with more, there are too few of them.
_CHUNK = 4
_LARGEST, _SMALLEST = 4096, 256

# Elements of a step that is less than a vector of 512 bits in float32. In blocks of 256, GCC computes one at a time in
# backward kernels: 8 LIFs take 75 ns a step, and 16 in blocks of 8. Forward kernels take 7 in both.
_FEW, _NARROW = 15, 8

# Bytes of a block's states: half of the nearest cache.
_CARRIED = 2**14

# Fewest blocks of a step, one for each of this number of threads; small steps have fewer, of the smallest size.
_BLOCKS = 16


def cpu_size_class(ncl: int) -> int:
    """The largest step that is walked like one of `ncl` elements."""
    if ncl <= _FEW:
        return _FEW
    limit = _BLOCKS * _SMALLEST
    while limit < min(ncl, _BLOCKS * _LARGEST):
        limit *= 2
    return limit


def cpu_plan(limit: int, carried: int, num_ops: int, backward_ops: int) -> LaunchPlan:
    """How steps of a size class are walked.

    Args:
        limit: from `cpu_size_class`.
        carried: bytes per element of the states.
        num_ops, backward_ops: of a step's forward and backward.
    """
    block = max(limit // _BLOCKS, _SMALLEST)
    while block > _SMALLEST and block * carried > _CARRIED:
        block //= 2
    forward = LaunchConfig(limited(_CHUNK, num_ops), block, num_warps=1)
    backward = LaunchConfig(limited(_CHUNK, backward_ops), _NARROW if limit == _FEW else block, num_warps=1)
    return LaunchPlan(inference=forward, forward=forward, backward=backward)
