"""Checks whether compiled kernels would accept a step function, on a machine that cannot run such kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.program._program import ScanProgram


def why_refused(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, training: bool
) -> str | None:
    """Returns the message of the error that kernels would raise for these tensors on a GPU; `None` without an error.

    Inside of a transform, the result is always `None`.

    Calls the core a few times, on tensors without data, and compiles nothing. The program stores the trace.

    Args:
        program: the step function.
        inputs: sequences `[T, *step]`.
        states: initial states `[*step]`; `None` for zeros.
        training: True if gradients will be needed.
    """
    if transform_at_work() is not None:
        return None  # a transform has wrapped the tensors
    try:
        step, _ = program.specialize(inputs, states)
        step.written_in("triton").check(training=training)
    except Exception as error:  # any exception, since the user's core runs on tensors without data
        return f"{type(error).__name__}: {error}"  # as text, since the error's traceback would keep tensors alive
    return None
