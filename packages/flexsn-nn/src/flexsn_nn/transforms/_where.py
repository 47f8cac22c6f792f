"""Selects values by a mask over sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Returns `yes` where the mask is True, and `no` elsewhere. `yes` and `no` have the same dtype."""
    return torch.where(mask, yes, no)


def per_sequence(mask: Tensor, state: Tensor) -> Tensor:
    """Reshapes a mask `[B, 1, ...]` of a step for a state `[B, ...]` that may have another number of dimensions."""
    if mask.dim() == state.dim():
        return mask
    return mask.reshape(-1, *[1] * (state.dim() - 1))
