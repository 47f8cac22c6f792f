"""Gradients that raise an error when they are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexsn_hop.errors import DoubleBackwardError

__all__ = ["refuse_double_backward"]


def refuse_double_backward(
    gradients: Sequence[torch.Tensor | None], origins: Sequence[Any], message: str
) -> list[torch.Tensor | None]:
    """Returns gradients that raise a `DoubleBackwardError` when they are differentiated themselves.

    Differentiating with respect to any tensor in ``origins`` raises the error. Torch's ``once_differentiable`` is not
    sufficient, because it treats the gradients as constants if the incoming gradients do not require grad, even if the
    saved tensors do.

    Args:
        gradients: One gradient or None for each argument.
        origins: Saved tensors, incoming gradients, and all other values from which the gradients were computed.
        message: The text of the error.
    """
    required = [value for value in origins if isinstance(value, torch.Tensor) and value.requires_grad]
    if not required:
        return list(gradients)
    computed = [gradient for gradient in gradients if gradient is not None]
    refusing = iter(_Undifferentiable.apply(message, len(computed), *computed, *required))
    return [None if gradient is None else next(refusing) for gradient in gradients]


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, num_gradients: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(gradient.view_as(gradient) for gradient in values[:num_gradients])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise DoubleBackwardError(ctx.message)
