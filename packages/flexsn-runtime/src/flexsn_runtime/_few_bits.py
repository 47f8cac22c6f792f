"""Small whole numbers that lie in few bits each, read by a kernel."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from flexsn_codegen import Pointwise, pointwise
from flexsn_runtime._availability import why_unavailable

_FORMATS = {torch.float16: "e", torch.bfloat16: "f", torch.float32: "f", torch.float64: "d"}


def unpack_numbers(packed: Tensor, bits: int, low: int, dtype: torch.dtype) -> Tensor | None:
    """The numbers that lie in bytes, the first one in the lowest bits; `None` where no Triton kernel can read them.

    A byte's numbers are written in words of up to 64 bits, as whole as memory takes them, so that a kernel costs
    little more than writing them.

    Args:
        packed: uint8, dense, of any shape.
        bits: of each number: 1, 2 or 4.
        low: what is added to each.
        dtype: of the result: a floating-point one of 2, 4 or 8 bytes; for others no kernel is there.

    Returns:
        One dimension, of `8 / bits` numbers for each byte.
    """
    if dtype not in _FORMATS or type(packed) is not Tensor or why_unavailable(packed.device) is not None:
        return None
    at_once, word = _word(bits, dtype)
    words = torch.empty(packed.numel(), 8 // bits // at_once, dtype=word, device=packed.device)
    _reader(bits, low, dtype).into(list(words.unbind(1)), packed.view(-1))
    return words.view(dtype).view(-1)


@functools.cache
def _word(bits: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How many of a byte's numbers a word holds, and the word's dtype."""
    at_once = min(8 // dtype.itemsize, 8 // bits)
    return at_once, torch.int64 if at_once * dtype.itemsize == 8 else torch.int32


def _pattern(number: int, dtype: torch.dtype) -> int:
    """The bits of a number, as an integer that is not negative."""
    bits = int.from_bytes(struct.pack(f"<{_FORMATS[dtype]}", number), "little")
    return bits >> 16 if dtype == torch.bfloat16 else bits  # exact: the numbers are small


@functools.cache
def _reader(bits: int, low: int, dtype: torch.dtype) -> Pointwise[[Tensor], tuple[Tensor, ...]]:
    """From a byte its words."""
    at_once, word = _word(bits, dtype)
    patterns = [_pattern(low + code, dtype) for code in range(1 << bits)]

    def placed(pattern: int, place: int) -> int:
        moved = pattern << (8 * dtype.itemsize * place)
        return moved - (1 << 64) if moved >> 63 else moved

    def word_of(byte: Tensor, first: int) -> Tensor:
        parts = []
        for place in range(at_once):
            code = (byte >> (bits * (first + place))) & ((1 << bits) - 1)
            part = torch.where(code == 1, placed(patterns[1], place), placed(patterns[0], place))
            for value, pattern in enumerate(patterns[2:], start=2):
                part = torch.where(code == value, placed(pattern, place), part)
            parts.append(part)
        return functools.reduce(torch.bitwise_or, parts).to(word)

    def numbers_of_a_byte(byte: Tensor) -> tuple[Tensor, ...]:
        return tuple(word_of(byte, first) for first in range(0, 8 // bits, at_once))

    return pointwise(numbers_of_a_byte)
