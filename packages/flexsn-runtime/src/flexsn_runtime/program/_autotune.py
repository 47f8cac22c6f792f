"""Finds the best launch settings of a step by measuring. The table of `plans/_buckets.py` does not suit all steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexsn_runtime.kernels._backward import BackwardScan, split_cotangents
from flexsn_runtime.kernels._forward import ForwardScan
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, fits
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._program import PointwiseProgram
from flexsn_runtime.step._pointwise_step import Specialization

Run = Callable[[], object]
Timer = Callable[[Run], float]


def tune(program: PointwiseProgram, flat_args: Sequence[Tensor], *, timer: Timer | None = None) -> LaunchPlan:
    """Measures a few configurations of each launch on these tensors, and stores the best ones as a plan on disk.

    Later launches, in this process and in later processes, use this plan. The plan applies to this step with tensors of
    these dtypes, on GPUs of this name, at all sizes of this size class. The plan does not affect the results of
    kernels. The operator inside of `torch.compile` does not use the plan.

    Args:
        program: the step.
        flat_args: `[*input_seqs, *init_states, *lifted]`, same as for `prepare`.
        timer: function that runs a launch and returns its duration; `None` to use Triton's `do_bench` on a GPU, and a
            clock on the CPU.

    Returns:
        The plan with the best configuration of each launch.

    Raises:
        The errors of `prepare`.

    Example:
        >>> program = PointwiseProgram(lambda x, v: (x + v, x + v), 1, 1, 1)
        >>> plan = tune(program, (torch.rand(64, 2**17, device="cuda"),))  # doctest: +SKIP
    """
    with torch.no_grad():
        step, arguments = prepare(program, flat_args)
        plan = _find_best(
            step, arguments, timer or (_measure_by_clock if step.device.type == "cpu" else _measure_by_triton)
        )
    step.keep_plan(math.prod(step.trace.step_shape), plan)
    program.forget_plans()
    return plan


def candidates(config: LaunchConfig) -> list[LaunchConfig]:
    """Returns `config`, and configurations that differ from it in elements and warps, in stages, or in the chunk.

    Example:
        >>> [(c.chunk, c.block, c.num_warps, c.stages) for c in candidates(LaunchConfig(4, 512, 4))]
        [(4, 512, 4, 1), (4, 256, 2, 1), (4, 1024, 8, 1), (4, 512, 4, 3), (2, 512, 4, 1), (8, 512, 4, 1)]
    """
    configs = [
        config,
        replace(config, block=config.block // 2, num_warps=max(config.num_warps // 2, 1)),
        replace(config, block=config.block * 2, num_warps=min(config.num_warps * 2, 8)),
        *(replace(config, stages=stages) for stages in (1, 3)),
        *(replace(config, chunk=chunk) for chunk in (config.chunk // 2, config.chunk * 2)),
    ]
    return [c for c in dict.fromkeys(configs) if c.block >= 32 and c.chunk >= 1]


def _find_best(step: Specialization, arguments: Arguments, timer: Timer) -> LaunchPlan:
    """Finds the best configuration of each launch, for one launch after another."""
    default = best = step.plan(math.prod(step.trace.step_shape))
    for name in ("inference", "forward", "backward"):
        plans = [replace(best, **{name: config}) for config in candidates(getattr(best, name))]
        times = {plan: time_of(step, arguments, plan, name, timer) for plan in plans if fits(plan, default)}
        best = min(times, key=times.__getitem__)
    return best


def time_of(step: Specialization, arguments: Arguments, plan: LaunchPlan, name: str, timer: Timer) -> float:
    """Returns the duration of one launch of a plan; infinity if the GPU has too little shared memory for the launch.

    Args:
        name: name of the launch to measure. The attribute of the plan with this name is the launch's configuration.
    """
    from triton import OutOfResources

    try:
        run = _prepare_launch(step, arguments, plan, name)
        run()
    except OutOfResources:
        return math.inf
    return timer(run)


def _prepare_launch(step: Specialization, arguments: Arguments, plan: LaunchPlan, name: str) -> Run:
    """Returns a function that launches a kernel with a plan. A backward kernel receives gradients of all outputs."""
    tensors = arguments.all
    needs_grad = tuple(t is not None and t.is_floating_point() for t in tensors)
    training = name != "inference"
    residuals = step.residuals(needs_grad) if training else None
    forward = ForwardScan(step, arguments, state_seqs=False, training=training, residuals=residuals, plan=plan)
    if name != "backward":
        return lambda: forward.run(tensors)
    trace = step.trace
    results = forward.run(tensors)
    grads = [torch.ones_like(output) for output in results[: trace.num_outputs]] + [None] * trace.num_states
    cotangents = split_cotangents(grads, trace.num_outputs, state_seqs=False)
    saved = results[forward.first_kept :]
    backward = BackwardScan(step, arguments, saved, cotangents, needs_grad, residuals=residuals, plan=plan)
    backward_arguments = (*tensors, *saved, *cotangents.all)
    return lambda: backward.run(backward_arguments)


def _measure_by_triton(run: Run) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


def _measure_by_clock(run: Run) -> float:
    def time_once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return statistics.median(time_once() for _ in range(9))
