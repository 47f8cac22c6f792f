"""Pooling of spikes with kernels that read and write each element once."""

from __future__ import annotations

from flexsn_nn.pooling._spike_pooling import PooledLayer, SpikePooling, plain_pooling, spike_pooling

__all__ = ["PooledLayer", "SpikePooling", "plain_pooling", "spike_pooling"]
