"""Whether compiled kernels would take a step function, asked where none can run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.program._program import ScanProgram


def why_refused(
    program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor] | None, *, training: bool
) -> str | None:
    """The error, in words, that compiled kernels would raise for these tensors on a GPU; `None`: none that shows here.

    The core is called a few times, on tensors without data. Nothing is kept of it, and nothing compiled.

    Args:
        program: the step function.
        inputs: sequences `[T, *step]`.
        states: initial states `[*step]`; `None`: zeros.
        training: whether gradients will be asked for.
    """
    if transform_at_work() is not None:
        return None  # the tensors are not what they look like
    aside = type(program)(
        program.core,
        program.num_inputs,
        program.num_states,
        program.num_outputs,
        program.requires_grad,
        precision=program.numerics.precision,
        fast_math=program.numerics.fast_math,
        residuals="recompute",
    )
    try:
        step, _ = aside.specialize(inputs, states)
        step.check(training=training)
    except Exception as error:  # the core is the user's: it may raise anything on tensors without data
        return f"{type(error).__name__}: {error}"  # not itself: its traceback holds tensors
    return None
