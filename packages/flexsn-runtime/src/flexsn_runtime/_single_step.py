"""One step at a time: a scan of length 1, prepared once for steps of one layout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_runtime._arguments import prepare
from flexsn_runtime._autocast import autocast_now
from flexsn_runtime._forward import ForwardScan
from flexsn_runtime._operands import layout_key
from flexsn_runtime._program import ScanProgram, Specialization
from flexsn_runtime._scan import forward_scan
from flexsn_runtime._staged_autograd import scan
from flexsn_runtime._torch_private import transform_at_work


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """What runs steps of one layout without gradients.

    Attributes:
        lifted: the layout of the captured tensors.
    """

    step: Specialization
    scan: ForwardScan
    lifted: tuple[object, ...]


def single_step(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """`(*outputs, *new_states)` of one step: as `prepare` and `scan` on sequences of one step, with their errors.

    Args:
        inputs: `[*step]` each, or what broadcasts to it.
        states: `[*step]` each; none: zeros.
    """
    results = repeated_step(program, inputs, states)
    if results is not None:
        return results
    step, arguments = prepare(program, (*[x.unsqueeze(0) for x in inputs], *states))
    written = scan(step, arguments, state_seqs=False)
    given = (*inputs, *states)
    plain = isinstance(step, Specialization) and not any(t.is_neg() for t in given)
    if states and plain and not _is_differentiated(given, arguments.lifted):
        assert isinstance(step, Specialization)
        found = forward_scan(step, arguments, state_seqs=False, training=False)
        program.single_steps[_key(inputs, given)] = PreparedStep(step, found, layout_key(arguments.lifted))
    outputs = step.trace.num_outputs
    return [*[output.squeeze(0) for output in written[:outputs]], *written[outputs:]]


def repeated_step(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor] | None:
    """What `single_step` returns, if it has run a step like this one, without gradients; else `None`.

    Such a step is launched as it is: what a scan of one step would ask and allocate takes longer than its kernel.
    """
    given = (*inputs, *states)
    try:
        known: PreparedStep | None = program.single_steps.get(_key(inputs, given))
    except (AttributeError, RuntimeError):  # no tensors, or without memory
        return None
    if known is None or transform_at_work() is not None:
        return None
    lifted = known.step.captured()
    if lifted is None or layout_key(lifted) != known.lifted or _is_differentiated(given, lifted):
        return None
    return known.scan.run_single((*given, *lifted))


def _key(inputs: Sequence[Tensor], given: Sequence[Tensor]) -> Hashable:
    return len(inputs), autocast_now(given[0].device), layout_key(given)


def _is_differentiated(given: Sequence[Tensor], lifted: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in (*given, *lifted):
            if tensor.requires_grad:
                return True
    return False
