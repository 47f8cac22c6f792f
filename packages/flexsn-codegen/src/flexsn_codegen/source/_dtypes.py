"""Torch dtypes in memory, and what holds their values in registers."""

from __future__ import annotations

import torch

# Half values live in float32 registers, rounded wherever eager rounds; memory keeps the narrow dtype.
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed with."""
    return torch.float32 if dtype in HALF_DTYPES else dtype
