"""Small whole numbers in few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BITS = 8


def bits_for(low: int, high: int) -> int | None:
    """How many bits a number from `low` to `high` takes, of 1, 2, 4 and 8; `None`: more."""
    return next((bits for bits in (1, 2, 4, 8) if high - low < 1 << bits), None)


@dataclass(eq=False)
class Bits:
    """Numbers of a dense tensor, in the order of its memory.

    Attributes:
        packed: uint8, `8 / bits` numbers in each.
        low: what is added to them.
        bits: of each.
        count: how many numbers there are.
    """

    packed: Tensor
    low: int
    bits: int
    count: int

    @classmethod
    def of(cls, flat: Tensor, low: int, bits: int) -> Bits:
        """Packs a tensor without holes, of one dimension, whose elements are whole numbers from `low` on."""
        whole = (flat - low if low else flat).to(torch.uint8)
        count, each = len(whole), 8 // bits
        if each > 1:
            missing = -count % each
            if missing:
                whole = torch.cat([whole, whole.new_zeros(missing)])
            shifts = _shifts(bits, flat.device)
            whole = (whole.view(-1, each) << shifts).sum(1, dtype=torch.uint8)
        return cls(whole, low, bits, count)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """What was packed, in one dimension."""
        flat = self.packed
        if self.bits < MOST_BITS:
            shifts = _shifts(self.bits, flat.device)
            flat = ((flat.unsqueeze(1) >> shifts) & ((1 << self.bits) - 1)).view(-1)[: self.count]
        numbers = flat.to(dtype)
        return numbers.add_(self.low) if self.low else numbers


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
