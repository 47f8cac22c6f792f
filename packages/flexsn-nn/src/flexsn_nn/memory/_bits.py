"""Stores small whole numbers in few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_runtime import pack_numbers, unpack_numbers

MOST_BITS = 8


def bits_for(low: int, high: int) -> int | None:
    """Returns the number of bits that store a number from `low` to `high`: 1, 2, 4 or 8; `None` if 8 do not suffice."""
    return next((bits for bits in (1, 2, 4, 8) if high - low < 1 << bits), None)


@dataclass(eq=False)
class Bits:
    """Packed elements of a dense tensor, in the order of its memory.

    Attributes:
        packed: uint8. Each byte contains `8 / bits` elements of the tensor.
        low: offset that is added to the stored values.
        bits: number of bits of each element.
        count: number of elements.
        row: number of elements in each row of `packed`, if `packed` has two dimensions. The rest of a row is padding.
    """

    packed: Tensor
    low: int
    bits: int
    count: int
    row: int | None = None

    @classmethod
    def of(cls, flat: Tensor, low: int, bits: int) -> Bits:
        """Packs a one-dimensional tensor without gaps. Its elements are whole numbers from `low` upwards."""
        count = len(flat)
        written = pack_numbers(flat, bits, low) if bits < MOST_BITS else None
        if written is not None:
            return cls(written, low, bits, count)
        if flat.dtype.itemsize == 1:
            flat = flat.to(torch.bfloat16)  # float8 has no arithmetic
        numbers = flat - low if low else flat
        if bits == MOST_BITS:
            return cls(numbers.to(torch.uint8), low, bits, count)
        # A product with powers of two reads the tensor only once. The results are at most 255, and exact in bfloat16.
        row = _BYTES * 8 // bits
        weights = _get_table("weights", bits, 0, flat.dtype, flat.device)
        rest = count % row
        packed = (numbers[: count - rest].view(-1, row) @ weights).to(torch.uint8).view(-1)
        if rest:
            last = numbers.new_zeros(row)
            last[:rest] = numbers[count - rest :]
            packed = torch.cat([packed, (last @ weights).to(torch.uint8)[: -(-rest * bits // 8)]])
        return cls(packed, low, bits, count)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns the unpacked elements, in one dimension."""
        if self.bits == MOST_BITS:
            bytewise = self.packed.to(dtype)
            return bytewise.add_(self.low) if self.low else bytewise
        numbers = unpack_numbers(self.packed, self.bits, self.low, dtype)
        if numbers is None:
            # A table maps each byte to all elements that it contains.
            table = _get_table("numbers", self.bits, self.low, dtype, self.packed.device)
            numbers = table.index_select(0, self.packed.view(-1).int()).view(-1).view(dtype)
        if self.count == numbers.numel():
            return numbers
        if self.row is None:
            return numbers[: self.count]
        return numbers.view(self.packed.shape[0], -1)[:, : self.row].contiguous().view(-1)


# Number of bytes that one row of the matrix product computes.
_BYTES = 16
# Integer dtypes by their size in bytes.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_tables: dict[tuple[object, ...], Tensor] = {}


def _get_table(kind: str, bits: int, low: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the table of `_compute_weights` or `_compute_elements`, which is created once and stored.

    A table that is created during the capture of a CUDA graph, or that has no values, is not stored.
    """
    key = kind, bits, low, dtype, device
    table = _tables.get(key)
    if table is None:
        with torch.inference_mode(False), torch.no_grad():
            new_table = (
                _compute_weights(bits, dtype, device)
                if kind == "weights"
                else _compute_elements(bits, low, dtype, device)
            )
        if type(new_table) is not Tensor or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return new_table
        table = _tables[key] = new_table
    return table


def _compute_weights(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the weight of each element in its byte, `[elements of a row, bytes of a row]`."""
    powers = (1 << torch.arange(0, 8, bits, device=device)).to(dtype)
    return torch.kron(torch.eye(_BYTES, dtype=dtype, device=device), powers.unsqueeze(1))


def _compute_elements(bits: int, low: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the elements of each byte, `[256, words]`.

    The memory of these elements is read as the widest integers ("words") that they fill.
    """
    shifts = torch.arange(0, 8, bits, device=device)
    numbers = (((torch.arange(256, device=device).unsqueeze(1) >> shifts) & ((1 << bits) - 1)) + low).to(dtype)
    return numbers.view(_WORDS[min(numbers.shape[1] * dtype.itemsize, 8)])
