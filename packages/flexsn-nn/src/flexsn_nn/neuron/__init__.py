"""Ready-made neurons. Their files are examples of how to write a neuron.

Every neuron is a `FlexSN`, except `PSN`, `MaskedPSN` and `SlidingPSN`.
"""

from __future__ import annotations

from flexsn_nn.neuron._adex import AdEx
from flexsn_nn.neuron._alif import ALIF
from flexsn_nn.neuron._alpha import Alpha
from flexsn_nn.neuron._base import Neuron, RunOptions, fit
from flexsn_nn.neuron._clif import CLIF
from flexsn_nn.neuron._cubalif import CUBALIF
from flexsn_nn.neuron._eif import EIF
from flexsn_nn.neuron._gated_lif import GatedLIF
from flexsn_nn.neuron._if import IF
from flexsn_nn.neuron._ilif import ILIF
from flexsn_nn.neuron._izhikevich import Izhikevich
from flexsn_nn.neuron._klif import KLIF
from flexsn_nn.neuron._lapicque import Lapicque
from flexsn_nn.neuron._leaky import Leaky
from flexsn_nn.neuron._li import LI, NonSpikingLIF
from flexsn_nn.neuron._liaf import LIAF
from flexsn_nn.neuron._lif import LIF
from flexsn_nn.neuron._plif import PLIF
from flexsn_nn.neuron._psn import PSN, MaskedPSN, SlidingPSN
from flexsn_nn.neuron._qif import QIF
from flexsn_nn.neuron._recurrent import Feedback, Recurrent
from flexsn_nn.neuron._refractory import RefractoryLIF
from flexsn_nn.neuron._reset import DelayedReset, ImmediateReset, ResetOptions, SpikeOptions
from flexsn_nn.neuron._rleaky import RLeaky, RSynaptic
from flexsn_nn.neuron._rlif import RALIF, RLIF
from flexsn_nn.neuron._stochastic import StochasticLIF
from flexsn_nn.neuron._synaptic import Synaptic
from flexsn_nn.neuron._ternary import TernaryIF, TernaryLIF

ParametricLIF = PLIF

__all__ = [
    "ALIF",
    "CLIF",
    "CUBALIF",
    "EIF",
    "IF",
    "ILIF",
    "KLIF",
    "LI",
    "LIAF",
    "LIF",
    "PLIF",
    "PSN",
    "QIF",
    "RALIF",
    "RLIF",
    "AdEx",
    "Alpha",
    "DelayedReset",
    "Feedback",
    "GatedLIF",
    "ImmediateReset",
    "Izhikevich",
    "Lapicque",
    "Leaky",
    "MaskedPSN",
    "Neuron",
    "NonSpikingLIF",
    "ParametricLIF",
    "RLeaky",
    "RSynaptic",
    "Recurrent",
    "RefractoryLIF",
    "ResetOptions",
    "RunOptions",
    "SlidingPSN",
    "SpikeOptions",
    "StochasticLIF",
    "Synaptic",
    "TernaryIF",
    "TernaryLIF",
    "fit",
]
