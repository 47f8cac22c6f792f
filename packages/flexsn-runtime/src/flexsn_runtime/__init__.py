"""Compiles and launches scan kernels, and integrates them into torch by autograd functions and custom operators."""

from __future__ import annotations

from flexsn_codegen import Late as Late
from flexsn_graph import Phase, TraceError, UnsupportedCoreError, words_of_elements
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._few_bits import native_unpacking, pack_numbers, unpack_numbers
from flexsn_runtime._float32_precision import float32_precision
from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.backend import TargetName, why_unavailable
from flexsn_runtime.compat._handles import (
    FlexSNKernelHandle,
    attach_flexsn_handle_finalizer,
    flexsn_kernel_registry_info,
    get_flexsn_kernel_handle,
    register_flexsn_kernel_handle,
    release_active_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
    retain_flexsn_kernel_handle,
    retain_owner_flexsn_kernel_handle,
)
from flexsn_runtime.compat._kernels import (
    ScanKernel,
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
)
from flexsn_runtime.compat._ops import (
    flexsn_inductor_backward,
    flexsn_inductor_inference,
    flexsn_inductor_inference_final_state,
    flexsn_inductor_training,
    flexsn_inductor_training_final_state,
)
from flexsn_runtime.compat._wrappers import (
    flexsn_backward,
    flexsn_forward,
    flexsn_inference,
    flexsn_inference_final_state,
)
from flexsn_runtime.delays import delay_between, delay_by_taps, why_no_delay_kernel
from flexsn_runtime.errors import (
    BackendUnavailableError,
    CapturedTensorError,
    DeviceError,
    DoubleBackwardError,
    DtypeError,
    FreedGraphError,
    GaveUpError,
    LateInputError,
    LauncherError,
    LayoutError,
    ResidualsError,
    ShapeError,
    SpikeBitsError,
    StepGoneError,
    SymbolicSizeError,
    TemplateNeededError,
    TensorCountError,
    TransformError,
    UnknownHandleError,
    UnsupportedScanError,
)
from flexsn_runtime.graphs._scan_lowering import KernelLowering
from flexsn_runtime.moments import batch_moments, batch_moments_op, has_moments
from flexsn_runtime.native import launcher_in_words, saving_hooks
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, flexsn_backward_ncl_bucket
from flexsn_runtime.pooling import Window, average_pool, max_pool, why_no_kernel
from flexsn_runtime.products import (
    Linked,
    Links,
    RepeatedProducts,
    fewest_multiplications,
    linked_linear,
    spike_linear,
    why_slow_product,
)
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._autotune import tune
from flexsn_runtime.program._completed_scan import completed_scan
from flexsn_runtime.program._completion import Completion, GradientFormula
from flexsn_runtime.program._cut_step import CutSpecialization
from flexsn_runtime.program._program import PointwiseProgram, ScanProgram
from flexsn_runtime.program._refusal import why_refused
from flexsn_runtime.program._repeated import (
    RepeatedCall,
    find_call,
    remember,
    repeated_call,
    repeated_scan,
    repeated_step,
    run_program,
    scan,
    scan_again,
)
from flexsn_runtime.program._single_step import single_step
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.step._pointwise_step import Specialization

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "BackendUnavailableError",
    "CapturedTensorError",
    "Completion",
    "CutSpecialization",
    "DeviceError",
    "DoubleBackwardError",
    "DtypeError",
    "FlexSNKernelHandle",
    "FreedGraphError",
    "GaveUpError",
    "GradientFormula",
    "KernelLowering",
    "Late",
    "LateInputError",
    "LaunchConfig",
    "LaunchPlan",
    "LauncherError",
    "LayoutError",
    "Linked",
    "Links",
    "Phase",
    "PointwiseProgram",
    "RecurrentSpecialization",
    "RepeatedCall",
    "RepeatedProducts",
    "ResidualsError",
    "ScanKernel",
    "ScanProgram",
    "ShapeError",
    "Specialization",
    "SpikeBitsError",
    "StepGoneError",
    "SymbolicSizeError",
    "TargetName",
    "TemplateNeededError",
    "TensorCountError",
    "TraceError",
    "TransformError",
    "UnknownHandleError",
    "UnsupportedCoreError",
    "UnsupportedScanError",
    "Window",
    "__version__",
    "attach_flexsn_handle_finalizer",
    "average_pool",
    "batch_moments",
    "batch_moments_op",
    "build_inference_final_state_kernel",
    "build_inference_kernel",
    "build_training_kernels",
    "completed_scan",
    "delay_between",
    "delay_by_taps",
    "fewest_multiplications",
    "find_call",
    "flexsn_backward",
    "flexsn_backward_ncl_bucket",
    "flexsn_forward",
    "flexsn_inductor_backward",
    "flexsn_inductor_inference",
    "flexsn_inductor_inference_final_state",
    "flexsn_inductor_training",
    "flexsn_inductor_training_final_state",
    "flexsn_inference",
    "flexsn_inference_final_state",
    "flexsn_kernel_registry_info",
    "float32_precision",
    "get_flexsn_kernel_handle",
    "has_moments",
    "launcher_in_words",
    "linked_linear",
    "max_pool",
    "native_unpacking",
    "pack_numbers",
    "prepare",
    "register_flexsn_kernel_handle",
    "release_active_flexsn_kernel_handle",
    "release_flexsn_kernel_handle",
    "remember",
    "repeated_call",
    "repeated_scan",
    "repeated_step",
    "retain_flexsn_kernel_handle",
    "retain_owner_flexsn_kernel_handle",
    "run_program",
    "saving_hooks",
    "scan",
    "scan_again",
    "single_step",
    "spike_linear",
    "transform_at_work",
    "triton_interpreted",
    "tune",
    "unpack_numbers",
    "why_no_delay_kernel",
    "why_no_kernel",
    "why_refused",
    "why_slow_product",
    "why_unavailable",
    "words_of_elements",
]
