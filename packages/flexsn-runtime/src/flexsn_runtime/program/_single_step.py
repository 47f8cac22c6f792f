"""Runs single steps as scans of length 1, which are prepared once for each layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import remember, repeated_step, scan


def single_step(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(*outputs, *new_states)` of one step, equal to the results of `prepare` and `scan` for T = 1.

    Raises the errors of `prepare`.

    Args:
        inputs: `[*step]` each, or tensors that broadcast to `[*step]`.
        states: `[*step]` each; empty for zeros.
    """
    results = repeated_step(program, inputs, states)
    if results is not None:
        return list(results)
    step, arguments = prepare(program, (*[x.unsqueeze(0) for x in inputs], *states))
    written = scan(step, arguments, state_seqs=False)
    if states:
        remember(program, inputs, states, step, arguments, single=True)
    outputs = step.trace.num_outputs
    return [*[output.squeeze(0) for output in written[:outputs]], *written[outputs:]]
