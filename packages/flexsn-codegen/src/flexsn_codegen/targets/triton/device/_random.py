"""Random numbers by Philox, with the bits that `flexsn_graph` defines in PyTorch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def element_word(low, high, row, column, index: tl.constexpr):
    """The word `index` of an element, by Philox 4x32-10."""
    key_0 = low.to(tl.uint32, bitcast=True)
    key_1 = high.to(tl.uint32, bitcast=True)
    a = column.to(tl.uint32, bitcast=True)
    b = row.to(tl.uint32, bitcast=True)
    c = tl.zeros_like(a)
    d = c
    for _ in tl.static_range(10):
        of_a = a.to(tl.uint64) * 0xD2511F53
        of_c = c.to(tl.uint64) * 0xCD9E8D57
        a = (of_c >> 32).to(tl.uint32) ^ b ^ key_0
        c = (of_a >> 32).to(tl.uint32) ^ d ^ key_1
        b = of_c.to(tl.uint32)
        d = of_a.to(tl.uint32)
        key_0 = key_0 + 0x9E3779B9
        key_1 = key_1 + 0xBB67AE85
    if index == 0:
        word = a
    elif index == 1:
        word = b
    else:
        word = c
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _words(first, second, third, step, stream):
    """The two uint32 words that an even step and the following odd step share, by Philox 2x32-7."""
    key = first.to(tl.uint32, bitcast=True)
    a = ((step >> 1) ^ second).to(tl.uint32, bitcast=True)
    b = (third ^ stream).to(tl.uint32, bitcast=True)
    for _ in tl.static_range(7):
        product = a.to(tl.uint64) * 0xD256D193
        a = (product >> 32).to(tl.uint32) ^ b ^ key
        b = product.to(tl.uint32)
        key = key + 0x9E3779B9
    return a, b


@triton.jit
def uniform_number(first, second, third, step, stream: tl.constexpr, bits: tl.constexpr, scale: tl.constexpr):
    """Random multiples of `scale`, which is `2**-bits`, in [0, 1)."""
    a, b = _words(first, second, third, step, stream)
    word = tl.where((step & 1) == 0, a, b) >> (32 - bits)
    return word.to(tl.int32, bitcast=True).to(tl.float32) * scale


@triton.jit
def normal_number(first, second, third, step, stream: tl.constexpr):
    """Normal numbers, from a cosine for even steps and from a sine for odd steps (Box and Muller, 1958)."""
    a, b = _words(first, second, third, step, stream)
    x = ((a >> 1) | 1).to(tl.int32, bitcast=True).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    value = x * 0.2858414053916931 + -0.4411187171936035
    value = value * x + 0.508065402507782
    value = value * x + -0.6651604771614075
    value = value * x + 0.9998043775558472
    value = value * x + -2.000009059906006
    square = value * x + (31 - exponent).to(tl.float32) * 1.3862943649291992
    half = square * 0.5
    inverse = (0x5F3759DF - (square.to(tl.int32, bitcast=True) >> 1)).to(tl.float32, bitcast=True)
    inverse = inverse * (1.5 - half * inverse * inverse)
    inverse = inverse * (1.500002384185791 - half * inverse * inverse)
    radius = square * inverse
    turn = (b.to(tl.int32, bitcast=True) - ((step & 1) << 30)).to(tl.float32) * 2.3283064365386963e-10
    angle = 0.25 - tl.abs(turn)
    square = angle * angle
    sine = ((square * -70.9934310913086 + 81.34076690673828) * square + -41.33714294433594) * square
    return radius * ((sine + 6.283164024353027) * angle)


__all__ = ["element_word", "normal_number", "uniform_number"]
