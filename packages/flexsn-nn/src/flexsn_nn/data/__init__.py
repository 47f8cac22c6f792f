"""Sequences of different lengths: batches of them, and what is read from a network over the steps that each has.

Data sets and transforms are torchvision's and tonic's; the pages on data show them together.
"""

from __future__ import annotations

from flexsn_nn.data._lengths import length_mask, mask_padding, readout
from flexsn_nn.data._pad import pad_sequences

__all__ = ["length_mask", "mask_padding", "pad_sequences", "readout"]
