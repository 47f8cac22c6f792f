"""What stands in front of a neuron, made part of its step."""

from __future__ import annotations

from flexsn_nn.fusion._absorbing_backend import AbsorbingBackend
from flexsn_nn.fusion._fuse_norms import fuse_norms, unfuse_norms
from flexsn_nn.fusion._report import Absorbed, FusedNorm, Fusion, LeftNorm, LeftProducer

__all__ = [
    "Absorbed",
    "AbsorbingBackend",
    "FusedNorm",
    "Fusion",
    "LeftNorm",
    "LeftProducer",
    "fuse_norms",
    "unfuse_norms",
]
