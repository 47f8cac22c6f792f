"""Runs a specialized step over time. The step stores one prepared scan for each layout of tensors."""

from __future__ import annotations

from collections.abc import Sequence

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
    spare_rows: int = 0,
    padding: int | None = None,
) -> ForwardScan:
    """Returns the forward scan over arguments of this layout.

    Args:
        state_seqs: True to write the states after every step, False to write only the final states.
        training, residuals, spare_rows, padding: same as for `ForwardScan`.
    """
    segments = choose_segments(step, arguments)
    key = ("forward", state_seqs, training, residuals, spare_rows, padding, segments, arguments.key)
    scan: ForwardScan | None = step.plans.get(key)
    if scan is None:
        scan = step.plans[key] = ForwardScan(
            step,
            arguments,
            state_seqs=state_seqs,
            training=training,
            residuals=residuals,
            spare_rows=spare_rows,
            padding=padding,
            segments=segments,
        )
    return scan


def run_backward(
    step: Specialization,
    arguments: Arguments,
    checkpoints: Sequence[Tensor],
    cotangents: Cotangents,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Scans backward.

    Args:
        arguments: the arguments of the forward.
        checkpoints: checkpoints from the forward.
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if its gradient is needed.

    Returns:
        The gradient of each tensor, in the tensor's shape: `None` if the gradient is not needed, and zeros if no
        gradient flows to the tensor.

    Raises:
        The errors of `check_readable`.
    """
    tensors = (*arguments.all, *checkpoints, *cotangents.all)
    check_readable(step.trace, tensors)
    key = ("backward", tuple(needs_grad), cotangents.state_seqs, choose_segments(step, arguments), layout_key(tensors))
    scan: BackwardScan | None = step.plans.get(key)
    if scan is None:
        scan = step.plans[key] = backward_of(step, tensors, tuple(needs_grad), state_seqs=cotangents.state_seqs)
    return scan.plan.run(tensors)


def backward_of(
    step: Specialization,
    tensors: Sequence[Tensor | None],
    needs_grad: tuple[bool, ...],
    *,
    state_seqs: bool,
    residuals: Residuals | None = None,
) -> BackwardScan:
    """Returns the backward scan over tensors of this layout.

    Args:
        tensors: `[*inputs, *states, *lifted, *checkpoints or *residuals, *grad_outputs, *grad_states]`.
        needs_grad: same as for `run_backward`.
        state_seqs: True if `grad_states` are gradients of state sequences, False if they are gradients of final states.
        residuals: same as for `BackwardScan`.
    """
    step.has_backward = True
    trace = step.trace
    arguments = Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values))
    first_kept = len(arguments.all)
    first_grad = first_kept + len(step.kept(residuals))
    saved = [t for t in tensors[first_kept:first_grad] if t is not None]
    cotangents = split_cotangents(tensors[first_grad:], trace.num_outputs, state_seqs=state_seqs)
    segments = choose_segments(step, arguments)
    return BackwardScan(step, arguments, saved, cotangents, needs_grad, residuals=residuals, segments=segments)
