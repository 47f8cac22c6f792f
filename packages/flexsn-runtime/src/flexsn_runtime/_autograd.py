"""A scan with gradients, by the shortest road: one `autograd.Function` over the two kernels.

The custom ops in `_ops.py` are the same for compilers. They cost several times the dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._backward import Cotangents
from flexsn_runtime._operands import Arguments
from flexsn_runtime._program import Specialization
from flexsn_runtime._scan import run_backward, run_forward
from flexsn_runtime.errors import DoubleBackwardError


def scan(step: Specialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if need be."""
    if torch.is_grad_enabled():
        for t in arguments.all:
            if t is not None and t.requires_grad:
                results: tuple[Tensor, ...] = _Scan.apply(  # type: ignore[no-untyped-call]
                    step, state_seqs, arguments, *arguments.all
                )
                return results
    return run_forward(step, arguments, state_seqs=state_seqs, checkpoints=False).returned


def split_cotangents(grads: Sequence[Tensor | None], num_outputs: int, *, state_seqs: bool) -> Cotangents:
    """Gradients of `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, by role."""
    outputs, states = tuple(grads[:num_outputs]), tuple(grads[num_outputs:])
    absent = (None,) * len(states)
    return Cotangents(outputs, states if state_seqs else absent, absent if state_seqs else states)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Specialization, state_seqs: bool, arguments: Arguments, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        result = run_forward(step, arguments, state_seqs=state_seqs, checkpoints=True)
        returned = result.returned
        ctx.save_for_backward(*tensors, *result.checkpoints)
        ctx.step, ctx.state_seqs = step, state_seqs
        ctx.set_materialize_grads(False)
        if not all(step.trace.differentiable):
            fixed = [t for t, d in zip(returned, step.trace.differentiable, strict=True) if not d]
            ctx.mark_non_differentiable(*fixed)
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        step: Specialization = ctx.step
        saved = ctx.saved_tensors
        trace = step.trace
        first_state = trace.num_inputs
        first_lifted = first_state + trace.num_states
        end = len(saved) - trace.num_states  # one checkpoint for each
        arguments = Arguments(saved[:first_state], saved[first_state:first_lifted], saved[first_lifted:end])
        run = torch.no_grad()(run_backward) if torch.is_grad_enabled() else run_backward
        gradients = run(
            step,
            arguments,
            saved[end:],
            split_cotangents(grads, step.trace.num_outputs, state_seqs=ctx.state_seqs),
            ctx.needs_input_grad[3:],
        )
        return None, None, None, *refuse_double_backward(gradients, (*saved, *grads))


def refuse_double_backward(
    gradients: Sequence[Tensor | None], came_from: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """`gradients`, which raise `DoubleBackwardError` when they are differentiated themselves.

    torch's `once_differentiable` would let them pass as constants when it is the saved tensors, and not the
    incoming gradients, that require grad.
    """
    if not torch.is_grad_enabled():  # no `create_graph`
        return gradients
    anchor = next((t for t in came_from if t is not None and t.requires_grad), None)
    if anchor is None:
        return gradients
    return [
        None if g is None else _Once.apply(anchor, g)  # type: ignore[no-untyped-call]
        for g in gradients
    ]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise DoubleBackwardError(
            "the gradient of a compiled scan has no gradient itself (double backward, create_graph=True). Use "
            "backend='torch', or leave create_graph out."
        )
