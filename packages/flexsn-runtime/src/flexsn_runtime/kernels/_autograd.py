"""A scan with gradients, by the shortest road: one `autograd.Function` over the two kernels.

The custom ops in `contract/_ops.py` are the same for compilers. They cost several times the dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import SingleLevelFunction, is_batched
from flexsn_runtime.errors import DoubleBackwardError, TransformError
from flexsn_runtime.kernels._scan import forward_scan
from flexsn_runtime.kernels._trained import TrainedScan, differentiable_results, trained_scan
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization


def scan_pointwise(step: Specialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if need be, and `*bits`."""
    tensors = arguments.all
    if torch.is_grad_enabled():
        wanted = tuple([t is not None and t.requires_grad for t in tensors])
        if True in wanted:
            return run_trained(trained_scan(step, arguments, wanted, state_seqs=state_seqs), tensors)
    return tuple(forward_scan(step, arguments, state_seqs=state_seqs, training=False).run(tensors))


def run_trained(scan: TrainedScan, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The same, of a scan that is prepared: of `[*inputs, *states, *lifted]`."""
    results: tuple[Tensor, ...] = _Scan.apply(scan, *tensors)
    return results


class _Scan(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, scan: TrainedScan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        written = scan.run(tensors)
        end = scan.first_kept
        ctx.save_for_backward(*tensors, *written[end:])
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        if scan.fixed:
            ctx.mark_non_differentiable(*[written[i] for i in scan.fixed])
        return tuple(written[:end])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        scan: TrainedScan = ctx.scan
        if not scan.step.trace.reads.holds_for_backward():
            scan.step.check_backward()
        tensors = (*ctx.saved_tensors, *grads[: scan.first_bits])
        try:
            backward = scan.backward(tensors, ctx.needs_input_grad)
        except RuntimeError:
            if not any(map(is_batched, grads)):
                raise
            raise several_at_once() from None
        if not torch.is_grad_enabled():
            return None, *backward.gradients(tensors)
        with torch.no_grad():  # `create_graph`
            gradients = backward.gradients(tensors)
        return None, *refuse_double_backward(gradients, tensors)


def several_at_once() -> TransformError:
    """The error of a backward to which gradients come batched."""
    return TransformError(
        "the backward of a compiled scan takes one gradient at a time, and several came at once "
        "(is_grads_batched=True, jacobian(vectorize=True), torch.func). Ask for them one by one, with "
        "vectorize=False, or use backend='torch'."
    )


def not_differentiable(
    step: CoreSpecialization, results: Sequence[Tensor], num_steps: int, *, state_seqs: bool
) -> list[Tensor]:
    """Those of the results that no gradient flows through. Without a step, final states are the initial ones."""
    differentiable = differentiable_results(step, num_steps, state_seqs=state_seqs)
    return [t for t, flows in zip(results, differentiable, strict=False) if not flows]


def refuse_double_backward(
    gradients: list[Tensor | None], came_from: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """`gradients`, which raise `DoubleBackwardError` when they are differentiated themselves.

    torch's `once_differentiable` would let them pass as constants when it is the saved tensors, and not the
    incoming gradients, that require grad.
    """
    anchor = next((t for t in came_from if t is not None and t.requires_grad), None)
    if anchor is None:
        return gradients
    return [
        None if g is None else _Once.apply(anchor, g)
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
