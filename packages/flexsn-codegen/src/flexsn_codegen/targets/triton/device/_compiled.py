"""The compiled implementation: `@triton.jit` functions that use libdevice.

Triton reads a function's source, so each function is written out. `_functions.py` lists the functions, and a test
compares that list with this module.

Some functions compute float32 results in float64, because the errors of libdevice's functions for float32 exceed 2 ulp.
In `asin`, `erfinv` and `pow`, the errors come from the approximate square roots and reciprocals with which Triton links
these functions. The Bessel functions, `erfcx` and `normcdfinv` are less exact even with exact square roots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from flexsn_codegen.targets.triton._functions import EXPORTED
from flexsn_codegen.targets.triton.device._float8 import (
    float8_e4m3fn_bits,
    float8_e4m3fn_value,
    float8_e5m2_bits,
    float8_e5m2_value,
)


@triton.jit
def widen(x):
    """Converts half values to float32, which is their dtype in registers."""
    if x.dtype == tl.float16 or x.dtype == tl.bfloat16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def load(pointers, mask, other=0):
    if pointers.dtype.element_ty == tl.float8e4nv:
        return float8_e4m3fn_value(
            tl.load(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), mask=mask, other=other)
        )
    elif pointers.dtype.element_ty == tl.float8e5:
        return float8_e5m2_value(tl.load(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), mask=mask, other=other))
    else:
        return widen(tl.load(pointers, mask=mask, other=other))


@triton.jit
def store(pointers, value, mask):
    if pointers.dtype.element_ty == tl.float8e4nv:
        tl.store(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), float8_e4m3fn_bits(value), mask=mask)
    elif pointers.dtype.element_ty == tl.float8e5:
        tl.store(pointers.to(tl.pointer_type(tl.uint8), bitcast=True), float8_e5m2_bits(value), mask=mask)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def store_bits(row, value, mask, number):
    """Stores one bit per element of a block: 1 if the element is not 0. A row has `number` bytes, each for 8 elements.

    The function stores bytes instead of words, because 8 elements are in one thread or in two neighbouring threads.
    """
    flags = ((value != 0) & mask).to(tl.int32)
    count: tl.constexpr = value.shape[0] // 8
    packed = tl.sum(tl.reshape(flags, [count, 8]) << tl.arange(0, 8)[None, :], axis=1)
    at = tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)
    tl.store(row + at, packed.to(tl.uint8), mask=at < number)


@triton.jit
def round_float16(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def round_bfloat16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_float8_e4m3fn(x):
    return float8_e4m3fn_value(float8_e4m3fn_bits(x))


@triton.jit
def round_float8_e4m3fn_saturating(x):
    return round_float8_e4m3fn(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)))


@triton.jit
def round_float8_e5m2(x):
    return float8_e5m2_value(float8_e5m2_bits(x))


@triton.jit
def div(x, y):
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def div_by_constant(x, y, reciprocal):
    """Multiplies `x` by the reciprocal of `y`, as eager mode on CUDA does if the divisor is a Python number."""
    return x * reciprocal


@triton.jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return libdevice.sqrt(x)


@triton.jit
def maximum(x, y):
    # By default, NaN would not be propagated.
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fmax(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def fmin(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def atan2(y, x):
    return libdevice.atan2(y, x)


@triton.jit
def hypot(x, y):
    return libdevice.hypot(x, y)


@triton.jit
def nextafter(x, y):
    return libdevice.nextafter(x, y)


@triton.jit
def pow(x, y):
    return libdevice.pow(x.to(tl.float64), y.to(tl.float64)).to(x.dtype)


@triton.jit
def power(x, n: tl.constexpr, BITS: tl.constexpr):
    """A float32 number to the power of `n`, a positive integer of `BITS` bits."""
    wide = x.to(tl.float64)
    result = wide
    for i in tl.static_range(1, BITS):
        result = result * result
        if (n >> (BITS - 1 - i)) & 1:
            result = result * wide
    return result.to(x.dtype)


@triton.jit
def inverse_power(x, n: tl.constexpr, BITS: tl.constexpr):
    """A float32 number to the power of `-n`, where `n` is a positive integer of `BITS` bits."""
    wide = x.to(tl.float64)
    result = wide
    for i in tl.static_range(1, BITS):
        result = result * result
        if (n >> (BITS - 1 - i)) & 1:
            result = result * wide
    return (1.0 / result).to(x.dtype)


@triton.jit
def fmod(x, y):
    # `%` is not exact, because it compiles to a division and an fma.
    return libdevice.fmod(x, y)


@triton.jit
def largest(x):
    """The largest element of a block, rounded towards zero. Loops use this integer as their bound."""
    return tl.max(x, axis=0).to(tl.int32)


@triton.jit
def signbit(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def asin(x):
    return libdevice.asin(x.to(tl.float64)).to(x.dtype)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def bessel_i0(x):
    return libdevice.cyl_bessel_i0(x.to(tl.float64)).to(x.dtype)


@triton.jit
def bessel_i1(x):
    return libdevice.cyl_bessel_i1(x.to(tl.float64)).to(x.dtype)


@triton.jit
def bessel_j0(x):
    return libdevice.j0(x.to(tl.float64)).to(x.dtype)


@triton.jit
def bessel_j1(x):
    return libdevice.j1(x.to(tl.float64)).to(x.dtype)


@triton.jit
def bessel_y0(x):
    return libdevice.y0(x.to(tl.float64)).to(x.dtype)


@triton.jit
def bessel_y1(x):
    return libdevice.y1(x.to(tl.float64)).to(x.dtype)


@triton.jit
def ceil(x):
    return libdevice.ceil(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erf_inv(x):
    return libdevice.erfinv(x.to(tl.float64)).to(x.dtype)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def erfcx(x):
    return libdevice.erfcx(x.to(tl.float64)).to(x.dtype)


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def floor(x):
    return libdevice.floor(x)


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log10(x):
    return libdevice.log10(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def log2(x):
    return libdevice.log2(x)


@triton.jit
def ndtri(x):
    return libdevice.normcdfinv(x.to(tl.float64)).to(x.dtype)


@triton.jit
def round(x):
    return libdevice.nearbyint(x)


@triton.jit
def rsqrt(x):
    return libdevice.rsqrt(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


# -- approximate variants, which use the GPU's instructions for float32 ----------------------------------------


@triton.jit
def fast_div(x, y):
    """Divides with an error of up to 2 ulp, without the branch to the slow path of an exact division."""
    return x / y


@triton.jit
def fast_exp(x):
    return tl.exp(x)


@triton.jit
def fast_exp2(x):
    return tl.exp2(x)


@triton.jit
def fast_pow(x, y):
    """Computes a power with an error of up to 4 ulp."""
    return libdevice.pow(x, y)


@triton.jit
def fast_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def fast_tanh(x):
    """Computes tanh with an absolute error of up to 1e-6. For small arguments, the relative error is larger."""
    if x.dtype == tl.float64:
        return libdevice.tanh(x)
    else:
        return 1.0 - 2.0 / (tl.exp(x * 2.0) + 1.0)


__all__ = EXPORTED
