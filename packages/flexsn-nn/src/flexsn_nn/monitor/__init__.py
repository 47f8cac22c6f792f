"""Monitors: forward hooks that record the activity of a network's neurons and synapses."""

from __future__ import annotations

from flexsn_nn.monitor._base import Monitor, Watcher
from flexsn_nn.monitor._rates import RateMonitor
from flexsn_nn.monitor._sequences import SpikeMonitor, StateMonitor
from flexsn_nn.monitor._synapses import SynapseMonitor, SynapticOperations

__all__ = [
    "Monitor",
    "RateMonitor",
    "SpikeMonitor",
    "StateMonitor",
    "SynapseMonitor",
    "SynapticOperations",
    "Watcher",
]
