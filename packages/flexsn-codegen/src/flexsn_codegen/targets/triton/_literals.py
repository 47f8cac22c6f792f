"""Triton's names of torch's dtypes, and Triton literals of these dtypes."""

from __future__ import annotations

from typing import Any

import torch

from flexsn_codegen.source._dtypes import register_dtype

_TL_NAMES = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.uint16: "tl.uint16",
    torch.uint32: "tl.uint32",
    torch.uint64: "tl.uint64",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


def accumulator(dtype: torch.dtype) -> Any:
    """Triton's dtype for sums of values of `dtype`: float64 for float64, otherwise float32."""
    import triton.language as tl  # imported at a launch, so that this module can be imported without Triton

    return tl.float64 if dtype == torch.float64 else tl.float32


def tl_name(dtype: torch.dtype) -> str:
    """The name of `dtype` in Triton, e.g. ``"tl.float32"``. Raises `KeyError` if Triton does not support it."""
    return _TL_NAMES[dtype]


def is_supported(dtype: torch.dtype) -> bool:
    return dtype in _TL_NAMES


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A scalar with a dtype, because a literal without a dtype would be promoted, or would be float32 by default."""
    name = tl_name(register_dtype(dtype))
    if dtype == torch.bool:
        return f"tl.full([], {bool(value)!r}, {name})"
    if not dtype.is_floating_point:
        return f"tl.full([], {int(value)}, {name})"
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return f'tl.full([], float("{number}"), {name})'
    if number == 0.0 and str(number).startswith("-"):
        # The literal -0.0 compiles to +0.0.
        return f"(tl.full([], 0.0, {name}) * tl.full([], -1.0, {name}))"
    return f"tl.full([], {number!r}, {name})"
