"""The implementation for Triton's interpreter: functions that call torch on the values of the interpreter.

The interpreter stores a value as a numpy array. numpy does not support bfloat16, so the array of a bfloat16 value
contains 16-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flexsn_codegen.targets.triton._functions import EXPORTED, UNARY
from flexsn_codegen.targets.triton._triton_private import array_of, as_flags, value_of


def _to_torch(x: Any) -> Tensor:
    # The array is copied, because `from_numpy` warns about broadcast arrays, which are not writable. The array is
    # flattened, because it may have no dimension.
    return torch.from_numpy(array_of(x).reshape(-1).copy())


def _on_torch(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(x: Any, *others: Any) -> Any:
        # Scalars and blocks are broadcast to one shape, as in the interpreter's ops.
        x, others = _same_shape(x, others)
        return _of_type(x, function(_to_torch(x), *map(_to_torch, others)), x.dtype)

    return call


def _same_shape(x: Any, others: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    for other in others:
        x, _ = tl.broadcast(x, other)
    return x, tuple(tl.broadcast(x, other)[1] for other in others)


def _of_type(x: Any, value: Tensor, kind: Any) -> Any:
    return value_of(x, value.numpy(), kind)


# The float8 dtypes, whose values the interpreter stores as arrays of integers.
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def widen(x: Any) -> Any:
    if x.dtype in _FLOAT8:
        return _of_type(x, _to_torch(x).view(_FLOAT8[x.dtype]).to(torch.float32), tl.float32)
    if x.dtype == tl.bfloat16:
        # The interpreter's conversion `to` is not used, because it flushes denormals to zero.
        return _of_type(x, _to_torch(x).view(torch.bfloat16).to(torch.float32), tl.float32)
    return x.to(tl.float32) if x.dtype == tl.float16 else x


def load(pointers: Any, mask: Any, other: Any = 0) -> Any:
    if pointers.dtype.element_ty in _FLOAT8:
        # `other` is omitted, because the interpreter would convert it to float8.
        return widen(tl.load(pointers, mask=as_flags(mask)))
    return widen(tl.load(pointers, mask=as_flags(mask), other=other))


def store(pointers: Any, value: Any, mask: Any) -> None:
    if pointers.dtype.element_ty == tl.bfloat16:
        # The value is converted here, because the interpreter's store would truncate instead of rounding.
        bits = _to_torch(value).to(torch.bfloat16).view(torch.uint16)
        value = _of_type(value, bits, tl.bfloat16)
    narrow = pointers.dtype.element_ty
    if narrow in _FLOAT8:
        value = _of_type(value, _to_torch(value).to(_FLOAT8[narrow]).view(torch.uint8), narrow)
    tl.store(pointers, value, mask=as_flags(mask))


def store_bits(row: Any, value: Any, mask: Any, number: Any) -> None:
    flags = (array_of(value) != 0) & array_of(as_flags(mask)).astype(bool)
    packed = flags.reshape(-1, 8).dot([1 << i for i in range(8)]).astype("uint8")
    at = tl.program_id(0).to(tl.int64) * len(packed) + tl.arange(0, len(packed))
    tl.store(row + at, value_of(at, packed, tl.uint8), mask=as_flags(at < number))


round_float16 = _on_torch(lambda x: x.to(torch.float16).to(torch.float32))
round_bfloat16 = _on_torch(lambda x: x.to(torch.bfloat16).to(torch.float32))
round_float8_e4m3fn = _on_torch(lambda x: x.to(torch.float8_e4m3fn).to(torch.float32))
round_float8_e4m3fn_saturating = round_float8_e4m3fn
round_float8_e5m2 = _on_torch(lambda x: x.to(torch.float8_e5m2).to(torch.float32))

div = _on_torch(torch.div)
div_by_constant = _on_torch(lambda x, y, reciprocal: x / y)  # eager mode on the CPU divides
sqrt = _on_torch(torch.sqrt)
maximum = _on_torch(torch.maximum)
minimum = _on_torch(torch.minimum)
fmax = _on_torch(torch.fmax)
fmin = _on_torch(torch.fmin)
atan2 = _on_torch(torch.atan2)
hypot = _on_torch(torch.hypot)
nextafter = _on_torch(torch.nextafter)
pow = _on_torch(torch.pow)


def power(x: Any, n: int, BITS: int) -> Any:
    return _of_type(x, (_to_torch(x).double() ** int(n)).to(torch.float32), x.dtype)


def inverse_power(x: Any, n: int, BITS: int) -> Any:
    return _of_type(x, (1.0 / _to_torch(x).double() ** int(n)).to(torch.float32), x.dtype)


# `fmod` is computed in float64, because torch's vectorized function for float32 returns NaN if the quotient is too
# large for float32.
fmod = _on_torch(lambda x, y: torch.fmod(x.double(), y.double()).to(x.dtype))


def signbit(x: Any) -> Any:
    return _of_type(x, torch.signbit(_to_torch(x)), tl.int1)


def largest(x: Any) -> int:
    return int(_to_torch(x).max())


def _unary(torch_name: str) -> Callable[..., Any]:
    function = reduce(getattr, torch_name.split("."), torch)
    return _on_torch(function)  # type: ignore[arg-type]


globals().update({name: _unary(torch_name) for name, (_, torch_name) in UNARY.items()})

# In the interpreter, the approximate variants are exact.
fast_div = div
fast_exp = _unary("exp")
fast_exp2 = _unary("exp2")
fast_pow = pow
fast_sqrt = sqrt
fast_tanh = _unary("tanh")

__all__ = EXPORTED
