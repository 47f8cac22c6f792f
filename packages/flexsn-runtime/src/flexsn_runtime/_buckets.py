"""Launch choices by size of the step."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

_LIMITS = (2**12, 2**17, 2**20, 2**23)


def flexsn_backward_ncl_bucket(ncl: int) -> int:
    """The size class of a step of `ncl` elements: 0 up to 2**12, 1 to 2**17, 2 to 2**20, 3 to 2**23, else 4.

    Example:
        >>> [flexsn_backward_ncl_bucket(n) for n in (1, 4096, 4097, 2**23 + 1)]
        [0, 0, 1, 4]
    """
    return sum(ncl > limit for limit in _LIMITS)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is generated and launched.

    Attributes:
        chunk: time steps whose loads are issued together.
        block: elements per program.
        num_warps: warps per program.
        stages: chunks in flight, copied ahead of their use to shared memory; 1: none.
    """

    chunk: int
    block: int
    num_warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launches of one size class.

    Attributes:
        inference: the forward when no gradient is needed.
        forward: the forward that writes checkpoints; its chunk is a multiple of the backward's.
        backward: its chunk is the distance of the checkpoints.
    """

    inference: LaunchConfig
    forward: LaunchConfig
    backward: LaunchConfig


# By the number of elements up to which a plan holds; measured by benchmarks/tune_launch.py on an H200, LIF, float32
# and bfloat16.
# Small steps leave most of the GPU idle: what counts is the latency of one element's chain of steps, so one element
# per thread, and many loads in flight. Large steps wait for memory: 16-byte loads and few registers.
_PLANS = {
    2**17: LaunchPlan(
        inference=LaunchConfig(chunk=8, block=32, num_warps=1, stages=6),
        forward=LaunchConfig(chunk=16, block=64, num_warps=1, stages=6),
        backward=LaunchConfig(chunk=8, block=32, num_warps=1, stages=6),
    ),
    2**20: LaunchPlan(
        inference=LaunchConfig(chunk=4, block=1024, num_warps=4, stages=2),
        forward=LaunchConfig(chunk=8, block=1024, num_warps=4),
        backward=LaunchConfig(chunk=8, block=512, num_warps=8),
    ),
    2**63: LaunchPlan(
        inference=LaunchConfig(chunk=4, block=512, num_warps=4),
        forward=LaunchConfig(chunk=8, block=512, num_warps=4, stages=3),
        backward=LaunchConfig(chunk=8, block=512, num_warps=8),
    ),
}

# For inputs of two bytes: as many bytes per load.
_NARROW_PLAN = LaunchPlan(
    inference=LaunchConfig(chunk=8, block=1024, num_warps=4),
    forward=LaunchConfig(chunk=8, block=1024, num_warps=4, stages=3),
    backward=LaunchConfig(chunk=8, block=1024, num_warps=4, stages=3),
)
_NARROW_PLANS = {2**17: _PLANS[2**17], 2**63: _NARROW_PLAN}

# Triton's interpreter runs programs one after the other: larger blocks, and chunks that small T still fill.
_INTERPRETED = LaunchPlan(
    inference=LaunchConfig(chunk=4, block=512, num_warps=1, stages=2),
    forward=LaunchConfig(chunk=8, block=512, num_warps=1, stages=2),
    backward=LaunchConfig(chunk=4, block=512, num_warps=1),
)


# Unrolled steps cost registers and compile time, the latter more than linearly. In ops of the step's forward
# graph (LIF: 8); a step of the backward counts four times, for recomputation and a VJP of thrice the size.
_MAX_UNROLLED = 512
_BACKWARD_FACTOR = 4


def size_class(ncl: int) -> int:
    """The largest step that is launched like one of `ncl` elements."""
    return next(limit for limit in _PLANS if ncl <= limit)


def fits(plan: LaunchPlan, usual: LaunchPlan) -> bool:
    """Whether kernels can be made of a plan, with the checkpoints where `usual` has them."""
    configs = (plan.inference, plan.forward, plan.backward)
    numbers = [n for c in configs for n in (c.chunk, c.block, c.num_warps, c.stages)]
    return (
        all(type(n) is int and n >= 1 for n in numbers)
        and all(c.block & (c.block - 1) == 0 for c in configs)
        and plan.backward.chunk == usual.backward.chunk
        and plan.forward.chunk % plan.backward.chunk == 0
    )


def launch_plan(ncl: int, num_ops: int, *, width: int, interpreted: bool) -> LaunchPlan:
    """The launches for a step of `ncl` elements and `num_ops` ops; the narrowest input has `width` bytes per element.

    They do not depend on T: one binary serves every T. `ncl` may be a compiler's symbol: comparing it guards its
    size class, not its value.
    """
    plans = _NARROW_PLANS if width == 2 else _PLANS
    return _limited_plan(next(plan for limit, plan in plans.items() if ncl <= limit), num_ops, interpreted)


@functools.cache
def _limited_plan(plan: LaunchPlan, num_ops: int, interpreted: bool) -> LaunchPlan:
    if interpreted:
        return _INTERPRETED
    segment = _limited(plan.backward.chunk, num_ops * _BACKWARD_FACTOR)
    chunk = max(segment, _limited(plan.forward.chunk, num_ops))
    return LaunchPlan(
        inference=replace(plan.inference, chunk=_limited(plan.inference.chunk, num_ops)),
        forward=replace(plan.forward, chunk=chunk),
        backward=replace(plan.backward, chunk=segment),
    )


def with_segment(plan: LaunchPlan, segment: int) -> LaunchPlan:
    """`plan` with checkpoints every `segment` steps, a power of two."""
    return replace(
        plan,
        forward=replace(plan.forward, chunk=max(plan.forward.chunk, segment)),
        backward=replace(plan.backward, chunk=segment),
    )


def _limited(chunk: int, ops_per_step: int) -> int:
    """`chunk`, halved until its ops are few enough."""
    while chunk > 1 and chunk * ops_per_step > _MAX_UNROLLED:
        chunk //= 2
    return chunk
