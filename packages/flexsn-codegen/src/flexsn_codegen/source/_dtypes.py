"""Torch dtypes in memory, and what holds their values in registers."""

from __future__ import annotations

import functools

import torch

# Half values live in float32 registers, rounded wherever eager rounds; memory keeps the narrow dtype.
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})

# So do float8 values, which eager mode only converts.
FLOAT8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
NARROW_DTYPES = HALF_DTYPES | FLOAT8_DTYPES


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed with."""
    return torch.float32 if dtype in NARROW_DTYPES else dtype


def rounding(dtype: torch.dtype) -> str:
    """The name of the function that rounds to a narrow dtype, behind ``round_``.

    Beyond its largest number, 448, newer versions of torch give that one for float8_e4m3fn, and older ones NaN.
    """
    name = str(dtype).removeprefix("torch.")
    return f"{name}_saturating" if dtype == torch.float8_e4m3fn and _saturates() else name


@functools.cache
def _saturates() -> bool:
    return bool(torch.tensor([1e4], device="cpu").to(torch.float8_e4m3fn).to(torch.float32) == 448.0)
