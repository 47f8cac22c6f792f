"""Checks whether compiled kernels would take a step function, on machines where none can run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.program._program import ScanProgram


def why_refused(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, training: bool
) -> str | None:
    """The error, in words, that compiled kernels would raise for these tensors on a GPU; `None`: none that shows here.

    The core is called a few times, on tensors without data, and nothing is compiled. The program keeps the trace.

    Args:
        program: the step function.
        inputs: sequences `[T, *step]`.
        states: initial states `[*step]`; `None`: zeros.
        training: whether gradients will be needed.
    """
    if transform_at_work() is not None:
        return None  # the tensors are not what they look like
    try:
        step, _ = program.specialize(inputs, states)
        step.written_in("triton").check(training=training)
    except Exception as error:  # the core is the user's: it may raise anything on tensors without data
        return f"{type(error).__name__}: {error}"  # not itself: its traceback holds tensors
    return None
