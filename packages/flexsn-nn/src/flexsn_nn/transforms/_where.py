"""Selection of values by a mask over sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` where the mask is True, `no` elsewhere, in the dtype of both."""
    return torch.where(mask, yes, no)


def per_sequence(mask: Tensor, state: Tensor) -> Tensor:
    """Reshapes a mask `[B, 1, ...]` of a step to a state `[B, ...]`, whose number of dimensions may differ."""
    if mask.dim() == state.dim():
        return mask
    return mask.reshape(-1, *[1] * (state.dim() - 1))
