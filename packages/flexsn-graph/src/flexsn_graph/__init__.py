"""Traces a PyTorch step function of a spiking neuron into a normalised ATen graph, forward and backward."""

from __future__ import annotations

from flexsn_graph._generate import generate_forward_and_backward_graph, generate_inference_graph
from flexsn_graph._info import FlexSNInfo, extract_info
from flexsn_graph._layout import LiftedLayout
from flexsn_graph._location import SourceLocation
from flexsn_graph._presence import Flag, Presence
from flexsn_graph._residuals import Residuals, keep_residuals, without_cotangents
from flexsn_graph._step import StepGraph, StepTrace, StepValue, StepVjp, trace_step
from flexsn_graph.errors import (
    CaptureError,
    ComplexDtypeError,
    CoreArityError,
    CoreReturnError,
    DataDependentError,
    ExampleError,
    GraphArityError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    RequiresGradError,
    StatefulCoreError,
    StateMismatchError,
    TraceError,
    TwoLayoutsError,
    UnsupportedCoreError,
)

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ComplexDtypeError",
    "CoreArityError",
    "CoreReturnError",
    "DataDependentError",
    "ExampleError",
    "Flag",
    "FlexSNInfo",
    "GraphArityError",
    "LiftedLayout",
    "MutationError",
    "NonPointwiseError",
    "Presence",
    "RandomOpError",
    "RequiresGradError",
    "Residuals",
    "SourceLocation",
    "StateMismatchError",
    "StatefulCoreError",
    "StepGraph",
    "StepTrace",
    "StepValue",
    "StepVjp",
    "TraceError",
    "TwoLayoutsError",
    "UnsupportedCoreError",
    "__version__",
    "extract_info",
    "generate_forward_and_backward_graph",
    "generate_inference_graph",
    "keep_residuals",
    "trace_step",
    "without_cotangents",
]
