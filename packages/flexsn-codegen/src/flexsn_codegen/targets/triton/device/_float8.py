"""Conversions of float8, by integer operations.

GPUs below compute capability 8.9 have no instructions for these conversions. The instructions of other GPUs saturate,
unlike the conversions of torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float8_e4m3fn_value(bits):
    size = (bits & 0x7F).to(tl.int32)
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    number = tl.where(size == 0x7F, float("nan"), number)
    sign = (bits & 0x80).to(tl.int32) << 24
    return (number.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def float8_e5m2_value(bits):
    size = (bits & 0x7F).to(tl.int32)
    normal = ((size << 21) + (112 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 4, size.to(tl.float32) * 0.0000152587890625, normal)
    number = tl.where(size == 0x7C, float("inf"), tl.where(size > 0x7C, float("nan"), number))
    sign = (bits & 0x80).to(tl.int32) << 24
    return (number.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def float8_e4m3fn_bits(x):
    """The bits of the nearest float8. Ties go to the even float8. Beyond the largest number, the result is NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + (0x7FFFF - (120 << 23)) + ((size >> 20) & 1)) >> 20
    # The addition rounds to a multiple of 2^-9, whose integer factor is in the lowest bits of the sum.
    denormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(size < 0x3C800000, denormal, tl.where(size > 0x43F00000, 0x7F, tl.minimum(normal, 0x7F)))
    return (((bits >> 24) & 0x80) | number).to(tl.uint8)


@triton.jit
def float8_e5m2_bits(x):
    """The bits of the nearest float8. Ties go to the even float8. Beyond the largest number, the result is infinity."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + (0xFFFFF - (112 << 23)) + ((size >> 21) & 1)) >> 21
    denormal = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    number = tl.where(size < 0x38800000, denormal, tl.where(size > 0x47800000, 0x7C, tl.minimum(normal, 0x7C)))
    number = tl.where(size > 0x7F800000, 0x7F, number)
    return (((bits >> 24) & 0x80) | number).to(tl.uint8)
