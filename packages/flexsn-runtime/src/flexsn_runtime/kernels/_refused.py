"""What the backward of a scan refuses, which autograd would ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime.errors import DoubleBackwardError, TransformError


def several_at_once() -> TransformError:
    """The error of a backward to which gradients come batched."""
    return TransformError(
        "the backward of a compiled scan takes one gradient at a time, and several came at once "
        "(is_grads_batched=True, jacobian(vectorize=True), torch.func). Ask for them one by one, with "
        "vectorize=False, or use backend='torch'."
    )


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
