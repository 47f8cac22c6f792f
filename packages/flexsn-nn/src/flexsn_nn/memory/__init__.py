"""Reduces the memory that a network uses between forward and backward."""

from __future__ import annotations

from flexsn_nn.memory._compiled import PackingBackend
from flexsn_nn.memory._packed_spikes import KeptWhole, PackedSpikes

__all__ = ["KeptWhole", "PackedSpikes", "PackingBackend"]
