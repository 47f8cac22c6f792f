"""Launch settings by the size of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from flexsn_graph import StepValue

_LIMITS = (2**12, 2**17, 2**20, 2**23)


def flexsn_backward_ncl_bucket(ncl: int) -> int:
    """Returns the size class of a step of `ncl` elements: 0 up to 2**12, 1 to 2**17, 2 to 2**20, 3 to 2**23, else 4.

    Example:
        >>> [flexsn_backward_ncl_bucket(n) for n in (1, 4096, 4097, 2**23 + 1)]
        [0, 0, 1, 4]
    """
    return sum(ncl > limit for limit in _LIMITS)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Settings for generating and launching a kernel.

    Attributes:
        chunk: time steps whose loads are issued together.
        block: elements per program.
        num_warps: warps per program.
        stages: number of chunks in flight, which are copied to shared memory before their use; 1 if no chunk is copied
            ahead.
    """

    chunk: int
    block: int
    num_warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Launch settings of one size class.

    Attributes:
        inference: settings of a forward without gradients.
        forward: settings of a forward that writes checkpoints. Its chunk is a multiple of the chunk of `backward`.
        backward: settings of the backward. Its chunk is the distance between checkpoints.
    """

    inference: LaunchConfig
    forward: LaunchConfig
    backward: LaunchConfig


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of a step. The costs and the number of elements determine the step's launch settings.

    Attributes:
        num_ops: operations of the step's forward graph; LIF has 8.
        inputs, outputs: bytes per element of each input and output. Outputs without a gradient are omitted. Inputs with
            few elements are also omitted, for example a mask with one element for each sequence.
    """

    num_ops: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Bytes per element that a step reads and writes."""
        return sum(self.inputs) + sum(self.outputs)

    @property
    def backward_ops(self) -> int:
        """Operations of a step in the backward: those of the step itself, and about three times as many of its VJP."""
        return 4 * self.num_ops

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[StepValue], outputs: Sequence[StepValue]) -> StepCost:
        """Computes the costs of a step's forward graph."""
        sizes = [math.prod(value.shape) for value in inputs]
        largest = max(sizes)
        large_inputs = [value for value, size in zip(inputs, sizes, strict=True) if size > max(1, largest // _FEW)]
        return cls(
            sum(node.op == "call_function" for node in graph.nodes),
            tuple(value.dtype.itemsize for value in large_inputs or inputs),
            tuple(value.dtype.itemsize for value in outputs if value.dtype.is_floating_point),
        )


# An input with one element for `_FEW` or more elements of the step is read from caches, so it does not count as memory
# traffic.
_FEW = 32

# Each key is the largest number of elements for which its plan is used. benchmarks/tune_launch.py measured the plans on
# an H200, with LIF and with a step of two inputs, in float32 and bfloat16.
# Small steps leave most of the GPU idle. A scan then takes as long as the steps of a single element, so plans for small
# steps have one element per thread and many loads in flight. Large steps wait for memory, so their plans have 16-byte
# loads and few registers. Steps of intermediate size have too few programs to give all multiprocessors equal shares.
# Smaller programs make the shares more equal.
_PLANS = {
    2**15: LaunchPlan(
        inference=LaunchConfig(chunk=8, block=32, num_warps=1, stages=6),
        forward=LaunchConfig(chunk=8, block=64, num_warps=1, stages=6),
        backward=LaunchConfig(chunk=8, block=32, num_warps=1, stages=4),
    ),
    2**17: LaunchPlan(
        inference=LaunchConfig(chunk=8, block=64, num_warps=1, stages=5),
        forward=LaunchConfig(chunk=8, block=64, num_warps=1, stages=5),
        backward=LaunchConfig(chunk=8, block=64, num_warps=1, stages=3),
    ),
    2**18: LaunchPlan(
        inference=LaunchConfig(chunk=4, block=512, num_warps=4, stages=3),
        forward=LaunchConfig(chunk=8, block=512, num_warps=4),
        backward=LaunchConfig(chunk=8, block=128, num_warps=2, stages=2),
    ),
    2**20: LaunchPlan(
        inference=LaunchConfig(chunk=4, block=1024, num_warps=4, stages=2),
        forward=LaunchConfig(chunk=8, block=512, num_warps=4),
        backward=LaunchConfig(chunk=8, block=512, num_warps=8),
    ),
    2**63: LaunchPlan(
        inference=LaunchConfig(chunk=4, block=512, num_warps=4),
        forward=LaunchConfig(chunk=8, block=512, num_warps=4, stages=3),
        backward=LaunchConfig(chunk=8, block=512, num_warps=8),
    ),
}

# Plans for steps with several inputs. Each stage has more loads, so fewer stages have the same number of loads in
# flight.
_SEVERAL_INPUTS = {
    2**15: LaunchPlan(*(LaunchConfig(chunk=8, block=32, num_warps=1, stages=4),) * 3),
    2**17: LaunchPlan(
        inference=LaunchConfig(chunk=8, block=64, num_warps=1, stages=4),
        forward=LaunchConfig(chunk=8, block=64, num_warps=1, stages=4),
        backward=LaunchConfig(chunk=8, block=64, num_warps=1, stages=2),
    ),
    2**18: replace(_PLANS[2**18], inference=LaunchConfig(chunk=4, block=512, num_warps=8)),
    2**20: replace(_PLANS[2**20], inference=LaunchConfig(chunk=4, block=512, num_warps=8)),
    2**63: _PLANS[2**63],
}

# Plans for steps whose narrowest input has two bytes per element, except small steps. Larger blocks keep the bytes of
# each load equal to those in `_PLANS`.
_WIDE = LaunchConfig(chunk=8, block=1024, num_warps=4, stages=3)
_TWO_BYTES = {
    **dict.fromkeys((2**18, 2**20), LaunchPlan(_WIDE, _WIDE, backward=replace(_WIDE, block=512))),
    2**63: LaunchPlan(inference=replace(_WIDE, stages=1), forward=_WIDE, backward=_WIDE),
}

# Triton's interpreter runs programs one after another, so the plan for the interpreter has larger blocks. The chunks of
# this plan are short, so that sequences of few steps fill them.
_INTERPRETED = LaunchPlan(
    inference=LaunchConfig(chunk=4, block=512, num_warps=1, stages=2),
    forward=LaunchConfig(chunk=8, block=512, num_warps=1, stages=2),
    backward=LaunchConfig(chunk=4, block=512, num_warps=1),
)


# Maximum number of ops in the unrolled steps of a chunk, counted in the step's forward graph (LIF: 8). Unrolled steps
# cost registers, and their compile time grows more than linearly.
_MAX_UNROLLED = 512

# Number of steps of the longest chunk in a plan.
_LONGEST = 8

# A sequence of up to `_SHORT` steps is one chunk of exactly these steps. A longer chunk that is half full would take as
# long as a full chunk. A single chunk has one stage, because no later chunk remains whose loads could be issued ahead.
_SHORT = 8

# Minimum bytes of a thread's elements for loads that are issued ahead. The GPU cannot copy fewer bytes
# ahead of their use, so the thread would wait for each load.
_MIN_AHEAD = 4

# Maximum number of elements of a step for which smaller programs make the shares of multiprocessors more equal.
_FEW_SCATTERED = 2**17

# Maximum bytes that a thread loads for a chunk. These bytes take half of the thread's registers.
_MAX_LOADED = 512

# Maximum bytes of a program's chunks in flight, in shared memory. A multiprocessor of an H200 then runs three programs
# at a time; a multiprocessor with 99 KiB of shared memory runs one program.
_MAX_IN_FLIGHT = 2**16


def size_class(ncl: int) -> int:
    """Returns the maximum number of elements per step to which the launch settings for `ncl` elements apply."""
    return next(limit for limit in _PLANS if ncl <= limit)


def fits(plan: LaunchPlan, usual: LaunchPlan) -> bool:
    """True if kernels can be generated from a plan, and the plan has the checkpoint distance of `usual`."""
    configs = (plan.inference, plan.forward, plan.backward)
    numbers = [n for c in configs for n in (c.chunk, c.block, c.num_warps, c.stages)]
    return (
        all(type(n) is int and n >= 1 for n in numbers)
        and all(c.block & (c.block - 1) == 0 for c in configs)
        and plan.backward.chunk == usual.backward.chunk
        and plan.forward.chunk % plan.backward.chunk == 0
    )


def launch_plan(ncl: int, cost: StepCost, *, interpreted: bool) -> LaunchPlan:
    """Returns the launch settings for a step of `ncl` elements.

    The settings are independent of T: one binary serves every T that is not short (see `one_chunk`). `ncl` may be a
    compiler's symbol. Comparisons then guard the size class, not the value.
    """
    return _choose_plan(size_class(ncl), cost, interpreted)


@functools.cache
def _choose_plan(limit: int, cost: StepCost, interpreted: bool) -> LaunchPlan:
    if interpreted:
        return _INTERPRETED
    if min(cost.inputs) == 2 and limit in _TWO_BYTES:
        plan = _TWO_BYTES[limit]
    else:
        plan = (_PLANS if len(cost.inputs) == 1 else _SEVERAL_INPUTS)[limit]
    segment = limited(plan.backward.chunk, cost.backward_ops)
    chunk = max(segment, limited(plan.forward.chunk, cost.num_ops))
    return LaunchPlan(
        inference=_fit(replace(plan.inference, chunk=limited(plan.inference.chunk, cost.num_ops)), cost.inputs),
        forward=_fit(replace(plan.forward, chunk=chunk), cost.inputs),
        backward=_fit(replace(plan.backward, chunk=segment), cost.inputs + cost.outputs),
    )


def one_chunk(config: LaunchConfig, num_steps: int, ops_per_step: int) -> LaunchConfig | None:
    """Returns `config` with one chunk for a short sequence.

    Returns `None` if `num_steps` is 0, too large, or a symbol, or if the chunk would have too many operations.
    """
    if not isinstance(num_steps, int) or not 0 < num_steps <= _SHORT:
        return None
    # A sequence of fewer than `_SHORT` steps may have twice the usual limit of ops, since one chunk is still better
    # than the code for whole chunks with additional code for the remaining steps. `_SHORT` steps consist of whole
    # chunks, so no steps remain.
    if num_steps * ops_per_step > (_MAX_UNROLLED if num_steps == _SHORT else 2 * _MAX_UNROLLED):
        return None
    return replace(config, chunk=num_steps, stages=1)


def checkpoint_distance(backward: LaunchConfig, num_steps: int, ops_per_step: int) -> int:
    """Returns the number of steps between two checkpoints, a power of two.

    If the backward is one chunk, it recomputes from the initial states, and no second segment needs a checkpoint.
    """
    short_config = one_chunk(backward, num_steps, ops_per_step)
    return backward.chunk if short_config is None else max(backward.chunk, 1 << (num_steps - 1).bit_length())


def _fit(config: LaunchConfig, read: tuple[int, ...]) -> LaunchConfig:
    """Returns `config` with a block and a number of stages that fit the GPU.

    The block has at least the elements that loads ahead require. Above this minimum, the block is halved until its
    loads fit into registers. The chunks in flight fit into shared memory.

    Args:
        read: bytes per element of each tensor that every step reads.
    """
    threads = 32 * config.num_warps
    min_block = threads if config.stages == 1 else threads * max(_MIN_AHEAD // min(read), 1)
    block = max(config.block, min_block)
    while block > min_block and config.chunk * sum(read) * block > _MAX_LOADED * threads:
        block //= 2
    chunks_ahead = _MAX_IN_FLIGHT // (config.chunk * block * sum(read))
    return replace(config, block=block, stages=min(config.stages, 1 + chunks_ahead))


def scattered(limit: int, plan: LaunchPlan) -> LaunchPlan:
    """Returns `plan` with one element per thread, for delays that differ between elements.

    With LIF and 16 delays on an H200, a scan with one element per thread takes 0.78 of the time of a scan with several
    elements per thread.

    Args:
        limit: maximum number of elements in the size class.
    """
    warps = 8 if limit > _FEW_SCATTERED else 4

    def use_one_element(config: LaunchConfig) -> LaunchConfig:
        return replace(config, block=32 * warps, num_warps=warps, stages=1)

    return LaunchPlan(use_one_element(plan.inference), use_one_element(plan.forward), use_one_element(plan.backward))


def with_segment(plan: LaunchPlan, segment: int) -> LaunchPlan:
    """Returns `plan` with checkpoints every `segment` steps."""
    return replace(
        plan,
        forward=replace(plan.forward, chunk=max(plan.forward.chunk // segment, 1) * segment),
        backward=replace(plan.backward, chunk=segment),
    )


def writable(interval: int, ops_per_step: int) -> int:
    """Returns the distance between checkpoints in a kernel, which is also the kernel's chunk.

    A kernel contains the code of all steps of a chunk. The distance is `interval`, unless this code would be too long.
    In that case, the distance is the largest divisor of `interval` that is at most the longest chunk of a plan. An
    interval may be any number if another lowering chose it, or if the interval stands for a scan without checkpoints.
    """
    if interval * max(ops_per_step, 1) <= _MAX_UNROLLED:  # even a step without operations has code
        return interval
    return next(distance for distance in range(min(interval, _LONGEST), 0, -1) if interval % distance == 0)


def limited(chunk: int, ops_per_step: int) -> int:
    """Returns `chunk`, halved until its ops are at most `_MAX_UNROLLED`, or until it is one step."""
    while chunk > 1 and chunk * ops_per_step > _MAX_UNROLLED:
        chunk //= 2
    return chunk
