"""Spiking neurons from step functions: what practitioners use."""

from __future__ import annotations

from flexsn_nn import distributed, encoding, functional, loss, monitor, neuron, nir_exchange, plot, surrogate
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._kernel import FlexSNKernel
from flexsn_nn._over_time import OverTime
from flexsn_nn.errors import (
    ExportError,
    InputCountError,
    InputDtypeError,
    MissingExtraError,
    NirError,
    ParameterError,
    PlacementError,
    StateError,
    StepModeError,
    UnknownNameError,
)
from flexsn_nn.neuron import (
    ALIF,
    CUBALIF,
    EIF,
    IF,
    ILIF,
    KLIF,
    LI,
    LIAF,
    LIF,
    PLIF,
    QIF,
    AdEx,
    Alpha,
    GatedLIF,
    Izhikevich,
    Lapicque,
    Leaky,
    NonSpikingLIF,
    ParametricLIF,
    Synaptic,
)
from flexsn_runtime import BackendUnavailableError

__version__ = "0.1.0"

__all__ = [
    "ALIF",
    "CUBALIF",
    "EIF",
    "IF",
    "ILIF",
    "KLIF",
    "LI",
    "LIAF",
    "LIF",
    "PLIF",
    "QIF",
    "AdEx",
    "Alpha",
    "BackendUnavailableError",
    "ExportError",
    "FlexSN",
    "FlexSNKernel",
    "GatedLIF",
    "InputCountError",
    "InputDtypeError",
    "Izhikevich",
    "Lapicque",
    "Leaky",
    "MissingExtraError",
    "NirError",
    "NonSpikingLIF",
    "OverTime",
    "ParameterError",
    "ParametricLIF",
    "PlacementError",
    "StateError",
    "StepModeError",
    "Synaptic",
    "UnknownNameError",
    "__version__",
    "distributed",
    "encoding",
    "functional",
    "loss",
    "monitor",
    "neuron",
    "nir_exchange",
    "plot",
    "surrogate",
]
