"""C++ names of torch's dtypes, and C++ literals of these dtypes."""

from __future__ import annotations

import torch

from flexsn_codegen.source._dtypes import register_dtype

# Types in memory. Kernels compute with `cpp_name(register_dtype(dtype))`.
_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.uint16: "uint16_t",
    torch.uint32: "uint32_t",
    torch.uint64: "uint64_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float8_e4m3fn: "dev::float8_e4m3fn",
    torch.float8_e5m2: "dev::float8_e5m2",
    torch.float16: "dev::float16",
    torch.bfloat16: "dev::bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}


def cpp_name(dtype: torch.dtype) -> str:
    """The C++ type of `dtype` in memory, e.g. ``"float"``. Raises `KeyError` if generated sources do not support it."""
    return _NAMES[dtype]


def is_supported(dtype: torch.dtype) -> bool:
    return dtype in _NAMES


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A literal with a type, because C++ would promote a literal without a type.

    A float32 literal is rounded once from float64, as in torch.
    """
    name = cpp_name(register_dtype(dtype))
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        integer = int(value)
        if dtype == torch.uint64:
            return f"{name}({integer}u)"
        # The smallest int64 cannot be a literal: C++ parses it as a minus sign and a number that is too large.
        return f"{name}({integer + 1} - 1)" if integer == -(2**63) else f"{name}({integer})"
    number = float(value)
    if number != number:
        return f"dev::nan<{name}>()"
    if number in (float("inf"), float("-inf")):
        return f"{'-' if number < 0 else ''}dev::infinity<{name}>()"
    return f"{name}({number!r})"
