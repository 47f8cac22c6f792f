"""The shape to which tensors broadcast, and the strides of results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_codegen.errors import ArgumentError


def plan_layout(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape to which the tensors broadcast, and the strides of a result whose memory has no holes.

    Raises:
        ArgumentError: the shapes do not broadcast.
    """
    shapes = [tuple(t.shape) for t in tensors]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ArgumentError(
            f"the arguments' shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast."
        ) from None
    return shape, _find_result_strides(tensors, shape)


def _find_result_strides(tensors: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a result: those of `torch.empty_like` for the first argument with the result's shape.

    If no argument has this shape, the strides are contiguous.
    """
    for tensor in tensors:
        if tuple(tensor.shape) == shape:
            # The tensor is on the meta device, because only its strides are needed.
            return tuple(torch.empty_like(tensor, device="meta").stride())
    return tuple(torch.empty(shape, device="meta").stride())
