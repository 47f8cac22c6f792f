"""Compiles the backward kernel while the forward one is compiled.

Each takes the better part of a second, most of it outside of Python. The first training step would wait for one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from flexsn_graph import Residuals
from flexsn_runtime.kernels._backward import BackwardScan, Cotangents
from flexsn_runtime.kernels._forward import ForwardScan
from flexsn_runtime.launches._beside import compiling
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.segments._choice import choose_segments
from flexsn_runtime.step._pointwise_step import Specialization

_NOTHING: AbstractContextManager[None] = nullcontext()


def compiling_backward(
    scan: ForwardScan,
    step: Specialization,
    arguments: Arguments,
    wanted: Sequence[bool],
    *,
    state_seqs: bool,
    residuals: Residuals | None,
) -> AbstractContextManager[None]:
    """While `scan` is compiled and runs, compiles the backward that will follow it, if it is the step's first.

    It is the one that most calls need: gradients come to the outputs alone, in their format. Another one is compiled
    when it is run.

    Args:
        wanted: for each of `[*inputs, *states, *lifted]`, whether it requires grad.
        state_seqs, residuals: as for `scan`.
    """
    if scan.plan.is_compiled or step.has_backward:
        return _NOTHING

    def prepare() -> list[Callable[[], object]]:
        trace = step.trace
        like = arguments.inputs[0]
        results = scan.results()
        outputs, kept = results[: trace.num_outputs], results[scan.first_kept :]
        cotangents = Cotangents(tuple(outputs), (None,) * trace.num_states, state_seqs)
        # Kernels are compiled for dtypes and alignment: tensors without elements stand in for those to come.
        to_come = [like.new_empty(0, dtype=t.dtype) for t in (*kept, *outputs)]
        segments = choose_segments(step, arguments)
        backward = BackwardScan(step, arguments, kept, cotangents, wanted, residuals=residuals, segments=segments)
        return backward.plan.compilations((*arguments.all, *to_come, *cotangents.states))

    return compiling(prepare)
