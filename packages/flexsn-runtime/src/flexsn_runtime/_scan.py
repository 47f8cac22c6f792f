"""Runs a specialised step over time. What a run needs besides its tensors is prepared once for each layout of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_runtime._backward import BackwardScan, Cotangents
from flexsn_runtime._forward import ForwardResult, ForwardScan
from flexsn_runtime._operands import Arguments, layout_key
from flexsn_runtime._program import Specialization


def run_forward(
    step: Specialization, arguments: Arguments, *, state_seqs: bool, checkpoints: bool
) -> ForwardResult:
    """Scans forward.

    Args:
        state_seqs: write the states after every step; otherwise the final ones alone.
        checkpoints: write what the backward recomputes from.
    """
    layout = layout_key(arguments.all) if arguments.key is None else arguments.key
    key = (state_seqs, checkpoints, layout)
    scan = step.forward_scans.get(key)
    if scan is None:
        scan = ForwardScan(step, arguments, state_seqs=state_seqs, checkpoints=checkpoints)
        step.forward_scans[key] = scan
    return scan(arguments)


def run_backward(
    step: Specialization,
    arguments: Arguments,
    checkpoints: Sequence[Tensor],
    cotangents: Cotangents,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Scans backward.

    Args:
        arguments: as in the forward.
        checkpoints: from the forward.
        wanted: for each of `[*inputs, *states, *lifted]`, whether its gradient is asked for.

    Returns:
        A gradient for each that is asked for, shaped like the tensor; zeros where no gradient flows.
    """
    # Whether the cotangents are those of state sequences or of final states, their shapes tell.
    key = (tuple(wanted), len(cotangents.outputs), layout_key((*arguments.all, *checkpoints, *cotangents.all)))
    scan = step.backward_scans.get(key)
    if scan is None:
        scan = step.backward_scans[key] = BackwardScan(step, arguments, cotangents, wanted)
    return scan(arguments, checkpoints, cotangents)
