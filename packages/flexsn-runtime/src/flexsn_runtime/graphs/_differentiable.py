"""Makes a function from two graphs: one computes a step, and the other computes the gradient of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import run_graph


def differentiable(
    core: Callable[..., Any], vjp: Callable[..., Any], cotangents: Sequence[bool], needs_grad: Sequence[bool]
) -> Callable[..., Any]:
    """Returns the step's core as a function whose gradient is `vjp`.

    The derivatives of the core's operators would be wrong: only `vjp` contains the user's surrogate gradients.

    Args:
        core: `[*arguments] -> [*results]`.
        vjp: `[*arguments, *cotangents] -> [*gradients]`.
        cotangents: for each result, True if `vjp` takes its gradient.
        needs_grad: for each argument, True if `vjp` returns its gradient.
    """

    class DifferentiableStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> tuple[Tensor, ...]:
            ctx.values = values
            results = _separate(run_graph(core, *values), values)
            flows = zip(results, cotangents, strict=True)
            ctx.mark_non_differentiable(*(result for result, flow in flows if not flow))
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            received = [gradient for gradient, flow in zip(gradients, cotangents, strict=True) if flow]
            vjp_results = iter(run_graph(vjp, *ctx.values, *received))
            return tuple(next(vjp_results) if is_needed else None for is_needed in needs_grad)

    apply: Callable[..., Any] = DifferentiableStep.apply
    return apply


def _separate(results: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the results. Copies each result that is an argument, an earlier result, or a view.

    Autograd marks tensors, not positions, as non-differentiable. If one tensor is returned as two results, and one
    result is marked, both results lose their gradients.
    """
    used_ids = {id(argument) for argument in arguments}
    separate_results = []
    for result in results:
        separate_results.append(result.clone() if id(result) in used_ids or result._is_view() else result)
        used_ids.add(id(result))
    return tuple(separate_results)
