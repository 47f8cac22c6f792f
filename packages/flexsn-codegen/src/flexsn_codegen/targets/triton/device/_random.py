"""Random numbers by Philox 4x32-10, to the bit as `flexsn_graph` defines them in PyTorch."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsn_codegen.targets.triton.device import _base as base


@triton.jit
def _words(low, high, step, row, column, stream):
    """The four words of the counter of a number, uint32."""
    key_0 = low.to(tl.uint32, bitcast=True)
    key_1 = high.to(tl.uint32, bitcast=True)
    a = (column >> 2).to(tl.uint32, bitcast=True)
    b = row.to(tl.uint32, bitcast=True)
    c = step.to(tl.uint32, bitcast=True)
    d = tl.zeros_like(c) + stream
    for _ in tl.static_range(10):
        high_a = tl.umulhi(a, tl.full([], 0xD2511F53, tl.uint32))
        high_c = tl.umulhi(c, tl.full([], 0xCD9E8D57, tl.uint32))
        low_a = a * 0xD2511F53
        low_c = c * 0xCD9E8D57
        a = high_c ^ b ^ key_0
        c = high_a ^ d ^ key_1
        b = low_c
        d = low_a
        key_0 = key_0 + 0x9E3779B9
        key_1 = key_1 + 0xBB67AE85
    return a, b, c, d


@triton.jit
def uniform_number(low, high, step, row, column, stream: tl.constexpr, bits: tl.constexpr, scale: tl.constexpr):
    """Multiples of `scale`, which is `2**-bits`."""
    a, b, c, d = _words(low, high, step, row, column, stream)
    even = (column & 1) == 0
    word = tl.where((column & 2) == 0, tl.where(even, a, b), tl.where(even, c, d))
    return (word >> (32 - bits)).to(tl.float32) * scale


@triton.jit
def _log(x):
    """Of a number from `2**-33` to 1; to the bit the one of PyTorch's implementation."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    power = exponent.to(tl.float32)
    square = x * x
    value = x * 7.0376836292e-2 - 1.1514610310e-1
    value = value * x + 1.1676998740e-1
    value = value * x - 1.2420140846e-1
    value = value * x + 1.4249322787e-1
    value = value * x - 1.6668057665e-1
    value = value * x + 2.0000714765e-1
    value = value * x - 2.4999993993e-1
    value = value * x + 3.3333331174e-1
    return power * 0.693359375 + (x + (value * x * square - power * 2.12194440e-4 - square * 0.5))


@triton.jit
def normal_number(low, high, step, row, column, stream: tl.constexpr):
    """By a cosine or a sine of a pair of words (Box and Muller, 1958)."""
    a, b, c, d = _words(low, high, step, row, column, stream)
    first = (column & 2) == 0
    length = tl.where(first, a, c).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    radius = base.rounded_sqrt(_log(length) * -2.0)
    turn = tl.where(first, b, d)
    quarter = (turn + 0x20000000) >> 30
    angle = (turn - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09
    square = angle * angle
    sine = ((square * -1.9515295891e-4 + 8.3321608736e-3) * square - 1.6666654611e-1) * square * angle + angle
    cosine = (square * 2.443315711809948e-5 - 1.388731625493765e-3) * square + 4.166664568298827e-2
    cosine = cosine * square * square - square * 0.5 + 1.0
    place = (quarter.to(tl.int32, bitcast=True) - (column & 1)) & 3
    value = tl.where((place & 1) == 0, cosine, sine)
    return radius * tl.where((place == 1) | (place == 2), value * -1.0, value)


__all__ = ["normal_number", "uniform_number"]
