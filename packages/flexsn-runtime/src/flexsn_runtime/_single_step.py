"""One step at a time: a scan of length 1, prepared once for steps of one layout."""

from __future__ import annotations

from collections.abc import Sequence
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

    Without gradients, steps like earlier ones are launched as they are: what a scan of them would ask and allocate
    takes longer than a kernel of one step.

    Args:
        inputs: `[*step]` each, or what broadcasts to it.
        states: `[*step]` each; none: zeros.
    """
    given = (*inputs, *states)
    key = None
    if states and transform_at_work() is None:
        key = (len(inputs), autocast_now(given[0].device), layout_key(given))
        known: PreparedStep | None = program.single_steps.get(key)
        if known is not None:
            lifted = known.step.captured()
            if lifted is not None and layout_key(lifted) == known.lifted and not _is_differentiated(given, lifted):
                return known.scan.run_single((*given, *lifted))
    step, arguments = prepare(program, (*[x.unsqueeze(0) for x in inputs], *states))
    results = scan(step, arguments, state_seqs=False)
    plain = isinstance(step, Specialization) and not any(t.is_neg() for t in given)
    if key is not None and plain and not _is_differentiated(given, arguments.lifted):
        assert isinstance(step, Specialization)
        found = forward_scan(step, arguments, state_seqs=False, training=False)
        program.single_steps[key] = PreparedStep(step, found, layout_key(arguments.lifted))
    outputs = step.trace.num_outputs
    return [*[output.squeeze(0) for output in results[:outputs]], *results[outputs:]]


def _is_differentiated(given: Sequence[Tensor], lifted: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *lifted))
