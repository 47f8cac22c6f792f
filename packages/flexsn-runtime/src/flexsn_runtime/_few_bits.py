"""Kernels that pack small integers into a few bits each, and unpack them."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen import Launches, Pointwise, pointwise
from flexsn_runtime._recent import Recent
from flexsn_runtime.backend import why_unavailable
from flexsn_runtime.native import RepeatedFunction

_FORMATS = {torch.float16: "e", torch.bfloat16: "f", torch.float32: "f", torch.float64: "d"}
_launches: Recent[Launches] = Recent()


def unpack_numbers(packed: Tensor, bits: int, low: int, dtype: torch.dtype) -> Tensor | None:
    """Returns the integers that bytes contain, as floating-point values; `None` if no Triton kernel can read the bytes.

    The lowest bits of a byte contain the first integer. The kernel combines the values of a byte into words of 32 or 64
    bits, so that few stores are necessary. Unpacking therefore takes hardly longer than only writing the values.

    Args:
        packed: uint8, dense, of any shape.
        bits: bits of each integer: 1, 2 or 4.
        low: integer that is added to each unpacked integer.
        dtype: dtype of the result: a floating-point dtype of 2, 4 or 8 bytes. No kernel exists for other dtypes.

    Returns:
        A tensor of one dimension, with `8 / bits` values for each byte.
    """
    return _make_unpacking(bits, low, dtype)((packed,))[0] if _has_kernels(packed, dtype) else None


def native_unpacking(bits: int, low: int, dtype: torch.dtype) -> Any:
    """Returns the compiled launcher's object for calls of `unpack_numbers`.

    Returns `None` if no call is recorded yet, or if a hook watches launches.

    The hooks of `saving_hooks` use this object.
    """
    return _make_unpacking(bits, low, dtype).native


@functools.cache
def _make_unpacking(bits: int, low: int, dtype: torch.dtype) -> RepeatedFunction:
    per_word, word = _choose_word(bits, dtype)

    def unpack(tensors: Sequence[Any]) -> tuple[Tensor]:
        (packed,) = tensors
        words = torch.empty(packed.numel(), 8 // bits // per_word, dtype=word, device=packed.device)
        _launch(_make_reader(bits, low, dtype), words.unbind(1), (packed.view(-1),))
        return (words.view(dtype).view(-1),)

    return RepeatedFunction(unpack)


def pack_numbers(numbers: Tensor, bits: int, low: int) -> Tensor | None:
    """Returns the bytes that `unpack_numbers` reads; `None` if no Triton kernel can write the bytes.

    Args:
        numbers: contiguous tensor of one dimension, in a dtype that `unpack_numbers` accepts. Its values are integers
            from `low` to `low + 2 ** bits - 1`.
        bits: bits of each integer: 1, 2 or 4.

    Returns:
        A uint8 tensor of one dimension. Bits after the last integer are 0.
    """
    return _make_packing(bits, low)((numbers,))[0] if _has_kernels(numbers, numbers.dtype) else None


@functools.cache
def _make_packing(bits: int, low: int) -> RepeatedFunction:
    per_byte = 8 // bits

    def pack(tensors: Sequence[Any]) -> tuple[Tensor]:
        (numbers,) = tensors
        num_full, num_remaining = divmod(len(numbers), per_byte)
        packed = torch.empty(num_full + (num_remaining > 0), dtype=torch.uint8, device=numbers.device)
        columns = numbers[: num_full * per_byte].view(num_full, per_byte).unbind(1)
        _launch(_make_writer(bits, low), (packed[:num_full],), columns)
        if num_remaining:
            last = numbers.new_full((per_byte,), low)
            last[:num_remaining] = numbers[num_full * per_byte :]
            _launch(_make_writer(bits, low), (packed[num_full:],), last.view(1, per_byte).unbind(1))
        return (packed,)

    return RepeatedFunction(pack)


def _has_kernels(tensor: Tensor, dtype: torch.dtype) -> bool:
    return dtype in _FORMATS and type(tensor) is Tensor and why_unavailable(tensor.device) is None


def _launch(function: Pointwise[..., tuple[Tensor, ...]], out: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Calls a pointwise function on `tensors`, and writes its results to the tensors `out`."""
    first = tensors[0]
    key = function, len(first), first.dtype, first.device
    launch = _launches.get(key)
    if launch is None:
        _launches[key] = function.repeated_into(out, *tensors)
    else:
        launch(out, tensors)


@functools.cache
def _choose_word(bits: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Returns how many of a byte's values one word contains, and the dtype of the word."""
    per_word = min(8 // dtype.itemsize, 8 // bits)
    return per_word, torch.int64 if per_word * dtype.itemsize == 8 else torch.int32


def _encode(number: int, dtype: torch.dtype) -> int:
    """Returns the bits of a number in a floating-point dtype, as a non-negative integer."""
    bits = int.from_bytes(struct.pack(f"<{_FORMATS[dtype]}", number), "little")
    return bits >> 16 if dtype == torch.bfloat16 else bits  # exact, because the integers are small


@functools.cache
def _make_reader(bits: int, low: int, dtype: torch.dtype) -> Pointwise[..., tuple[Tensor, ...]]:
    """Returns the pointwise function that maps a byte to the words of its values."""
    per_word, word = _choose_word(bits, dtype)
    patterns = [_encode(low + code, dtype) for code in range(1 << bits)]

    def shift_pattern(pattern: int, index: int) -> int:
        shifted = pattern << (8 * dtype.itemsize * index)
        return shifted - (1 << 64) if shifted >> 63 else shifted

    def word_of(byte: Tensor, first: int) -> Tensor:
        parts = []
        for index in range(per_word):
            code = (byte >> (bits * (first + index))) & ((1 << bits) - 1)
            part = torch.where(code == 1, shift_pattern(patterns[1], index), shift_pattern(patterns[0], index))
            for value, pattern in enumerate(patterns[2:], start=2):
                part = torch.where(code == value, shift_pattern(pattern, index), part)
            parts.append(part)
        return functools.reduce(torch.bitwise_or, parts).to(word)

    def numbers_of_a_byte(byte: Tensor) -> tuple[Tensor, ...]:
        return tuple(word_of(byte, first) for first in range(0, 8 // bits, per_word))

    return pointwise(numbers_of_a_byte)


@functools.cache
def _make_writer(bits: int, low: int) -> Pointwise[..., tuple[Tensor, ...]]:
    """Returns the pointwise function that maps the values of a byte to the byte."""

    def byte_of_numbers(*numbers: Tensor) -> tuple[Tensor, ...]:
        codes = [(number - low).to(torch.int32) << (bits * index) for index, number in enumerate(numbers)]
        return (functools.reduce(torch.bitwise_or, codes).to(torch.uint8),)

    return pointwise(byte_of_numbers)
