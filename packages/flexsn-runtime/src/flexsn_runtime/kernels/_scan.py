"""Runs a specialised step over time. What a run needs besides its tensors is prepared once for each layout of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from flexsn_graph import Residuals
from flexsn_runtime.kernels._backward import BackwardScan, Cotangents, split_cotangents
from flexsn_runtime.kernels._forward import ForwardResult, ForwardScan
from flexsn_runtime.kernels._refused import check_readable
from flexsn_runtime.operands._operands import Arguments, layout_key
from flexsn_runtime.segments._choice import choose_segments
from flexsn_runtime.step._pointwise_step import Specialization


def run_forward(
    step: Specialization, arguments: Arguments, *, state_seqs: bool, training: bool, padding: int | None = None
) -> ForwardResult:
    """Scans forward; see `forward_scan`."""
    return forward_scan(step, arguments, state_seqs=state_seqs, training=training, padding=padding)(arguments)


def forward_scan(
    step: Specialization,
    arguments: Arguments,
    *,
    state_seqs: bool,
    training: bool,
    residuals: Residuals | None = None,
    padding: int | None = None,
) -> ForwardScan:
    """What scans forward over arguments of this layout.

    Args:
        state_seqs: write the states after every step; otherwise the final ones alone.
        training, residuals, padding: as for `ForwardScan`.
    """
    prepared = prepared_scans(step, arguments)
    segments = choose_segments(step, arguments)
    written = (state_seqs, training, residuals, padding, segments)
    scan: ForwardScan | None = prepared.get(written)
    if scan is None:
        scan = prepared[written] = ForwardScan(
            step,
            arguments,
            state_seqs=state_seqs,
            training=training,
            residuals=residuals,
            padding=padding,
            segments=segments,
        )
    return scan


def prepared_scans(step: Specialization, arguments: Arguments) -> dict[Hashable, Any]:
    """What is prepared for arguments of this layout, and what will be."""
    prepared = arguments.prepared
    if prepared is None:
        layout = layout_key(arguments.all)
        prepared = step.forward_scans.get(layout)
        if prepared is None:
            prepared = step.forward_scans[layout] = {}
    return prepared


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
    tensors = (*arguments.all, *checkpoints, *cotangents.all)
    return backward_scan(step, tensors, tuple(wanted), state_seqs=cotangents.state_seqs).run(tensors)


def backward_scan(
    step: Specialization,
    tensors: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
    *,
    state_seqs: bool,
    residuals: Residuals | None = None,
) -> BackwardScan:
    """What scans backward over tensors of this layout.

    Args:
        tensors: `[*inputs, *states, *lifted, *checkpoints or *residuals, *grad_outputs, *grad_states]`.
        wanted: as for `run_backward`.
        state_seqs: whether the last are the gradients of state sequences, or of final states.
        residuals: as for `BackwardScan`.

    Raises:
        As `check_readable`.
    """
    check_readable(step.trace, tensors)
    trace = step.trace
    arguments = Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values))
    segments = choose_segments(step, arguments)
    key = (wanted, state_seqs, residuals, segments, layout_key(tensors))
    scan = step.backward_scans.get(key)
    if scan is None:
        first_kept = len(arguments.all)
        first_grad = first_kept + len(step.kept(residuals))
        kept = [t for t in tensors[first_kept:first_grad] if t is not None]
        grads = tensors[first_grad:]
        cotangents = split_cotangents(grads, trace.num_outputs, state_seqs=state_seqs)
        scan = step.backward_scans[key] = BackwardScan(
            step, arguments, kept, cotangents, wanted, residuals=residuals, segments=segments
        )
    return scan
