"""Torch dtypes in memory, and the dtypes of their values in registers."""

from __future__ import annotations

import functools

import torch

# float16 and bfloat16 values are float32 in registers, and are rounded where eager mode rounds. In memory, values have
# these dtypes.
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})

# Float8 values are also float32 in registers. In eager mode, conversions are the only operations on them.
FLOAT8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
NARROW_DTYPES = HALF_DTYPES | FLOAT8_DTYPES


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute with values of `dtype`."""
    return torch.float32 if dtype in NARROW_DTYPES else dtype


def rounding(dtype: torch.dtype) -> str:
    """The name, without ``round_``, of the function that rounds to a narrow dtype.

    For values above 448, the largest float8_e4m3fn number, newer versions of torch return 448, and older versions
    return NaN.
    """
    name = str(dtype).removeprefix("torch.")
    return f"{name}_saturating" if dtype == torch.float8_e4m3fn and _saturates() else name


@functools.cache
def _saturates() -> bool:
    return bool(torch.tensor([1e4], device="cpu").to(torch.float8_e4m3fn).to(torch.float32) == 448.0)
