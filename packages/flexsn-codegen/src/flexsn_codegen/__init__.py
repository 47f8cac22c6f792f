"""Turns FX graphs of pointwise functions into source in Triton, C++ or CUDA C++, and compiles the source to kernels."""

from __future__ import annotations

from flexsn_codegen.compat._kernels import (
    get_flexsn_backward_kernel,
    get_flexsn_forward_kernel,
    get_flexsn_inference_final_state_kernel,
    get_flexsn_inference_kernel,
)
from flexsn_codegen.core._core import emit_core, generate_triton_code_str
from flexsn_codegen.errors import (
    ArgumentError,
    AutogradError,
    CacheFolderError,
    DeviceError,
    GraphError,
    KernelGoneError,
    KernelNameError,
    OfflineCompileError,
    PrecisionError,
    TraceError,
    TransformError,
    TritonMissingError,
    UnsupportedOpError,
    WriteError,
)
from flexsn_codegen.functions._pointwise import Gradient, Pointwise, pointwise
from flexsn_codegen.functions._prepared import Launches
from flexsn_codegen.scan import BackwardSpec, ForwardSpec, backward_source, forward_source
from flexsn_codegen.source._cache import cache_folder, compile_triton_code_str, prune_cache, write_private
from flexsn_codegen.source._dtypes import register_dtype
from flexsn_codegen.source._numbers import Number
from flexsn_codegen.source._numerics import Numerics, Precision, compile_options
from flexsn_codegen.source._source import DENSE, CoreSource, InputLayout, KernelSource, Late, Once, StepLayout
from flexsn_codegen.targets import WORD, Approximate, KernelWriter, OpCall, Statement, Target
from flexsn_codegen.targets._register import register_op, supported_ops
from flexsn_codegen.targets.triton import TRITON, OfflineJob, ResourceUse, compile_offline
from flexsn_graph import generate_forward_and_backward_graph, generate_inference_graph

__version__ = "0.1.0"

__all__ = [
    "DENSE",
    "TRITON",
    "WORD",
    "Approximate",
    "ArgumentError",
    "AutogradError",
    "BackwardSpec",
    "CacheFolderError",
    "CoreSource",
    "DeviceError",
    "ForwardSpec",
    "Gradient",
    "GraphError",
    "InputLayout",
    "KernelGoneError",
    "KernelNameError",
    "KernelSource",
    "KernelWriter",
    "Late",
    "Launches",
    "Number",
    "Numerics",
    "OfflineCompileError",
    "OfflineJob",
    "Once",
    "OpCall",
    "Pointwise",
    "Precision",
    "PrecisionError",
    "ResourceUse",
    "Statement",
    "StepLayout",
    "Target",
    "TraceError",
    "TransformError",
    "TritonMissingError",
    "UnsupportedOpError",
    "WriteError",
    "__version__",
    "backward_source",
    "cache_folder",
    "compile_offline",
    "compile_options",
    "compile_triton_code_str",
    "emit_core",
    "forward_source",
    "generate_forward_and_backward_graph",
    "generate_inference_graph",
    "generate_triton_code_str",
    "get_flexsn_backward_kernel",
    "get_flexsn_forward_kernel",
    "get_flexsn_inference_final_state_kernel",
    "get_flexsn_inference_kernel",
    "pointwise",
    "prune_cache",
    "register_dtype",
    "register_op",
    "supported_ops",
    "write_private",
]
