"""Batches of sequences of different lengths, and readouts over the steps of each sequence.

Data sets and their transforms come from torchvision and tonic. The documentation about data shows how to use both
libraries together with this package.
"""

from __future__ import annotations

from flexsn_nn.data._lengths import length_mask, mask_padding, readout
from flexsn_nn.data._pad import pad_sequences

__all__ = ["length_mask", "mask_padding", "pad_sequences", "readout"]
