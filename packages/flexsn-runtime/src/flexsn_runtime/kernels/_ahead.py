"""Compiles the backward kernel while the forward kernel is being compiled.

Each compilation takes nearly a second, and spends most of this time outside of Python. Without this module, the first
training step would wait for one compilation after the other.
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
    needs_grad: Sequence[bool],
    *,
    state_seqs: bool,
    residuals: Residuals | None,
) -> AbstractContextManager[None]:
    """Returns a context in which the step's first backward is compiled while `scan` is compiled and runs.

    This is the backward that most calls need. In this backward, only the outputs have gradients, and the gradients have
    the format of the outputs. Any other backward is compiled when it first runs.

    Args:
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if it requires grad.
        state_seqs, residuals: same as for `scan`.
    """
    if scan.plan.is_compiled or step.has_backward:
        return _NOTHING

    def prepare() -> list[Callable[[], object]]:
        trace = step.trace
        example = arguments.inputs[0]
        results = scan.results()
        outputs, saved = results[: trace.num_outputs], results[scan.first_kept :]
        cotangents = Cotangents(tuple(outputs), (None,) * trace.num_states, state_seqs)
        # Compilation depends only on dtypes and alignments, so tensors without elements can represent later tensors.
        later_tensors = [example.new_empty(0, dtype=t.dtype) for t in (*saved, *outputs)]
        segments = choose_segments(step, arguments)
        backward = BackwardScan(step, arguments, saved, cotangents, needs_grad, residuals=residuals, segments=segments)
        return backward.plan.compilations((*arguments.all, *later_tensors, *cotangents.states))

    return compiling(prepare)
