"""Batches of sequences of different lengths, and readouts over the steps of each sequence.

torchvision and tonic provide data sets and transforms. The documentation about data shows how to use these libraries
with this package.
"""

from __future__ import annotations

from flexsn_nn.data._lengths import length_mask, mask_padding, readout
from flexsn_nn.data._pad import pad_sequences

__all__ = ["length_mask", "mask_padding", "pad_sequences", "readout"]
