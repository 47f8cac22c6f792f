"""Launch settings on the CPU by the size of a step."""

from __future__ import annotations

from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, limited

# Measured with LIF on an EPYC with AVX2. With blocks of 4096 elements, the loops over lanes are long, and a state fits
# in the L1 cache. The registers suffice for four steps at a time, but not for more.
_CHUNK = 4
_LARGEST, _SMALLEST = 4096, 256

# In float32, a step of up to `_FEW` elements is less than one vector of 512 bits. With blocks of 256, the backward
# kernels that GCC compiles process the elements one at a time: LIF with 8 elements takes 75 ns per step, and 16 ns with
# blocks of 8. Forward kernels take 7 ns with either block size.
_FEW, _NARROW = 15, 8

# Maximum bytes of a block's states: half of the L1 cache.
_CARRIED = 2**14

# Minimum number of blocks of a step, so that each of up to this number of threads has a block. Small steps have fewer
# blocks, of the smallest size.
_BLOCKS = 16


def cpu_size_class(ncl: int) -> int:
    """Returns the maximum number of elements per step in the size class that contains `ncl`."""
    if ncl <= _FEW:
        return _FEW
    limit = _BLOCKS * _SMALLEST
    while limit < min(ncl, _BLOCKS * _LARGEST):
        limit *= 2
    return limit


def cpu_plan(limit: int, carried: int, num_ops: int, backward_ops: int) -> LaunchPlan:
    """Returns the launch plan for steps of a size class.

    Args:
        limit: result of `cpu_size_class`.
        carried: bytes per element of the states.
        num_ops, backward_ops: number of operations of a step's forward and backward.
    """
    block = max(limit // _BLOCKS, _SMALLEST)
    while block > _SMALLEST and block * carried > _CARRIED:
        block //= 2
    forward = LaunchConfig(limited(_CHUNK, num_ops), block, num_warps=1)
    backward = LaunchConfig(limited(_CHUNK, backward_ops), _NARROW if limit == _FEW else block, num_warps=1)
    return LaunchPlan(inference=forward, forward=forward, backward=backward)
