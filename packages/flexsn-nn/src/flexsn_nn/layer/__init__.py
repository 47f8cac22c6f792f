"""Layers to place between neurons: delays, dropout with one mask for all steps, normalisation, and residual blocks."""

from __future__ import annotations

from flexsn_nn._delay import Delay
from flexsn_nn._stateful import Stateful
from flexsn_nn.layer._blocks import MSBlock, SEWBlock
from flexsn_nn.layer._dropout import SharedDropout
from flexsn_nn.layer._norm import (
    ThresholdDependentBatchNorm1d,
    ThresholdDependentBatchNorm2d,
    ThresholdDependentBatchNorm3d,
)
from flexsn_nn.layer._norm_neuron import NormNeuron

__all__ = [
    "Delay",
    "MSBlock",
    "NormNeuron",
    "SEWBlock",
    "SharedDropout",
    "Stateful",
    "ThresholdDependentBatchNorm1d",
    "ThresholdDependentBatchNorm2d",
    "ThresholdDependentBatchNorm3d",
]
