"""Fuses norms, delays and elementwise functions with the neurons after them."""

from __future__ import annotations

from flexsn_nn.fusion._absorbing_backend import AbsorbingBackend
from flexsn_nn.fusion._fuse_delays import fuse_delays
from flexsn_nn.fusion._fuse_norms import fuse_norms, unfuse_norms
from flexsn_nn.fusion._report import Absorbed, DelayFusion, FusedNorm, Fusion, LeftNorm, LeftProducer

__all__ = [
    "Absorbed",
    "AbsorbingBackend",
    "DelayFusion",
    "FusedNorm",
    "Fusion",
    "LeftNorm",
    "LeftProducer",
    "fuse_delays",
    "fuse_norms",
    "unfuse_norms",
]
