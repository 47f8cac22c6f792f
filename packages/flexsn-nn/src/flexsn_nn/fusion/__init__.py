"""What stands in front of a neuron, made part of its step."""

from __future__ import annotations

from flexsn_nn.fusion._fuse_norms import fuse_norms, unfuse_norms
from flexsn_nn.fusion._report import FusedNorm, Fusion, LeftNorm

__all__ = ["FusedNorm", "Fusion", "LeftNorm", "fuse_norms", "unfuse_norms"]
