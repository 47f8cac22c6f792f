"""Traces a PyTorch step function of a spiking neuron into a normalised ATen graph, forward and backward."""

from __future__ import annotations

from flexsn_graph._location import SourceLocation, location_of
from flexsn_graph._run_graph import run_graph
from flexsn_graph._trace_lock import TRACE_LOCK
from flexsn_graph.cells import Axis, CellResult, Cells, Part, Pieces, StepPieces
from flexsn_graph.compat._generate import generate_forward_and_backward_graph, generate_inference_graph
from flexsn_graph.compat._info import FlexSNInfo, extract_info
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
    NothingCutError,
    RandomOpError,
    RequiresGradError,
    StatefulCoreError,
    StateMismatchError,
    TorchError,
    TraceError,
    TwoLayoutsError,
    UnsupportedCoreError,
    UnsupportedOpError,
)
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.ir._ops import ROW_MAX, ROW_MIN, ROW_OPS, ROW_SUM, OpFacts, facts_of, known_ops, register_facts
from flexsn_graph.ir._ports import Port, Role, ports
from flexsn_graph.ir._products import convolution_weight
from flexsn_graph.ir._random import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER, words_of_elements
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.passes._continuity import continuous_nodes
from flexsn_graph.passes._ends import ends_early
from flexsn_graph.passes._linearity import ancestors, is_linear, linear_part
from flexsn_graph.passes._presence import Flag, Presence
from flexsn_graph.passes._zero_one import not_zero_one
from flexsn_graph.staging import absent_at_first, is_of_any_batch, resized, without_carried_filters
from flexsn_graph.staging._ends import staged_ends_early
from flexsn_graph.staging._staged_step import Phase, Product, Stage, StagedStep, Term, View
from flexsn_graph.traces._cell_trace import CellGraph, CellStep, cells_effects, cells_gradient_of, trace_cells
from flexsn_graph.traces._cut import CutTrace, cut_step
from flexsn_graph.traces._pointwise import (
    MAX_DIMENSIONS,
    ArgumentType,
    PointwiseGraph,
    gradient_of,
    pointwise_effects,
    trace_pointwise,
)
from flexsn_graph.traces._recurrent import RecurrentTrace, trace_core
from flexsn_graph.traces._residuals import Residuals, keep_residuals, without_cotangents
from flexsn_graph.traces._step import CoreTrace, StepTrace, StepValue, trace_step
from flexsn_graph.tracing._substitute import Converted, Effects, Substituted

__version__ = "0.1.0"

__all__ = [
    "ELEMENT_WORD",
    "MAX_DIMENSIONS",
    "NORMAL_NUMBER",
    "ROW_MAX",
    "ROW_MIN",
    "ROW_OPS",
    "ROW_SUM",
    "TRACE_LOCK",
    "UNIFORM_NUMBER",
    "ArgumentType",
    "Axis",
    "CaptureError",
    "CellGraph",
    "CellResult",
    "CellStep",
    "Cells",
    "ComplexDtypeError",
    "Converted",
    "CoreArityError",
    "CoreReturnError",
    "CoreTrace",
    "CutTrace",
    "DataDependentError",
    "Effects",
    "ExampleError",
    "Flag",
    "FlexSNInfo",
    "GraphArityError",
    "LiftedLayout",
    "MutationError",
    "NonPointwiseError",
    "NothingCutError",
    "OpFacts",
    "Part",
    "Phase",
    "Pieces",
    "PointwiseGraph",
    "Port",
    "Presence",
    "Product",
    "RandomOpError",
    "RecurrentTrace",
    "RequiresGradError",
    "Residuals",
    "Role",
    "SourceLocation",
    "Stage",
    "StagedStep",
    "StateMismatchError",
    "StatefulCoreError",
    "StepGraph",
    "StepPieces",
    "StepTrace",
    "StepValue",
    "Substituted",
    "Term",
    "TorchError",
    "TraceError",
    "TwoLayoutsError",
    "UnsupportedCoreError",
    "UnsupportedOpError",
    "View",
    "__version__",
    "absent_at_first",
    "ancestors",
    "cells_effects",
    "cells_gradient_of",
    "continuous_nodes",
    "convolution_weight",
    "cut_step",
    "ends_early",
    "extract_info",
    "facts_of",
    "generate_forward_and_backward_graph",
    "generate_inference_graph",
    "gradient_of",
    "is_linear",
    "is_of_any_batch",
    "keep_residuals",
    "known_ops",
    "linear_part",
    "location_of",
    "not_zero_one",
    "pointwise_effects",
    "ports",
    "register_facts",
    "resized",
    "run_graph",
    "staged_ends_early",
    "trace_cells",
    "trace_core",
    "trace_pointwise",
    "trace_step",
    "without_carried_filters",
    "without_cotangents",
    "words_of_elements",
]
