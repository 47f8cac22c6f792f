"""A step's graph as a function whose gradient is another graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import run_graph


def differentiable(
    core: Callable[..., Any], vjp: Callable[..., Any], cotangents: Sequence[bool], needs_grad: Sequence[bool]
) -> Callable[..., Any]:
    """The step's core as a function whose gradient is `vjp`.

    The gradient of the core's own operators would be wrong: only `vjp` contains the user's surrogate gradients.

    Args:
        core: `[*arguments] -> [*results]`.
        vjp: `[*arguments, *gradients] -> [*gradients]`.
        cotangents: for each result, True if `vjp` takes its gradient.
        needs_grad: for each argument, True if `vjp` returns its gradient.
    """

    class DifferentiableStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> tuple[Tensor, ...]:
            ctx.values = values
            results = _apart(run_graph(core, *values), values)
            flows = zip(results, cotangents, strict=True)
            ctx.mark_non_differentiable(*(result for result, flow in flows if not flow))
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            came = [gradient for gradient, flow in zip(gradients, cotangents, strict=True) if flow]
            found = iter(run_graph(vjp, *ctx.values, *came))
            return tuple(next(found) if is_needed else None for is_needed in needs_grad)

    apply: Callable[..., Any] = DifferentiableStep.apply
    return apply


def _apart(results: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the results. Copies each result that is an argument, an earlier result, or a view.

    Autograd marks tensors, not positions. If one tensor is two results, marking one of them as constant removes the
    gradient of both.
    """
    taken = {id(argument) for argument in arguments}
    apart = []
    for result in results:
        apart.append(result.clone() if id(result) in taken or result._is_view() else result)
        taken.add(id(result))
    return tuple(apart)
