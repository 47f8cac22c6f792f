"""Small whole numbers that lie in few bits each, read by a kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexsn_codegen import Pointwise, pointwise
from flexsn_runtime._availability import why_unavailable

_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack_numbers(packed: Tensor, bits: int, low: int, dtype: torch.dtype) -> Tensor | None:
    """The numbers that lie in bytes, the first one in the lowest bits; `None` where no Triton kernel can read them.

    A byte's numbers are written in words of 64 bits, as whole as memory takes them, so that a kernel costs little more
    than writing them. Reading them from a table of 256 rows takes ten times as long on a GPU.

    Args:
        packed: uint8, dense, of any shape.
        bits: of each number: 1, 2 or 4.
        low: what is added to each.
        dtype: of the result, floating-point, of 2, 4 or 8 bytes.

    Returns:
        One dimension, of `8 / bits` numbers for each byte.
    """
    integers = _AS_INTEGERS.get(dtype.itemsize)
    if integers is None or not dtype.is_floating_point or why_unavailable(packed.device) is not None:
        return None
    at_once = min(8 // dtype.itemsize, 8 // bits)
    word = torch.int64 if at_once * dtype.itemsize == 8 else torch.int32
    words = torch.empty(packed.numel(), 8 // bits // at_once, dtype=word, device=packed.device)
    patterns = tuple(torch.arange(low, low + (1 << bits), dtype=dtype, device="cpu").view(integers).tolist())
    _reader(bits, patterns, 8 * dtype.itemsize, at_once, word).into(list(words.unbind(1)), packed.view(-1))
    return words.view(dtype).view(-1)


@functools.cache
def _reader(
    bits: int, patterns: tuple[int, ...], width: int, at_once: int, word: torch.dtype
) -> Pointwise[[Tensor], tuple[Tensor, ...]]:
    """From a byte its words, of so many numbers `at_once`.

    Args:
        patterns: for each code of so many bits, the number's own `width` bits, as an integer.
    """

    def placed(pattern: int, place: int) -> int:
        moved = (pattern & ((1 << width) - 1)) << (width * place)
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
