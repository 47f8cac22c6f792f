"""Access to private names of torch, for the whole package. Importing this module checks that each name exists.

No other code of the package looks up names that differ between versions.
"""

from __future__ import annotations

from flexsn_hop._torch_private._builtin import builtin_scan, builtin_while_loop
from flexsn_hop._torch_private._dispatch import below_autograd, implement, refuse_autograd
from flexsn_hop._torch_private._dynamo import (
    CapturedCall,
    CapturedTreeCall,
    CaptureHooks,
    DynamoStep,
    TreeCaptureHooks,
    TreeParts,
    register_with_dynamo,
    why_dynamo_cannot_capture,
)
from flexsn_hop._torch_private._inductor import InductorCall, LowersItself
from flexsn_hop._torch_private._ops import HigherOrderOperator, OpOverload
from flexsn_hop._torch_private._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from flexsn_hop._torch_private._step_code import ALIGNMENT, RowsOf, StepCode, compile_step, fake_results
from flexsn_hop._torch_private._tracing import (
    capture_with_dynamo,
    is_tracing,
    is_transforming,
    numbers_of_a_step,
    outside_of_tracing,
    trace_step,
    unlogged,
    watch_operators,
)
from flexsn_hop.versions import warn_if_newer

__all__ = [
    "ALIGNMENT",
    "CaptureHooks",
    "CapturedCall",
    "CapturedTreeCall",
    "DynamoStep",
    "HigherOrderOperator",
    "InductorCall",
    "LowersItself",
    "OpOverload",
    "RowsOf",
    "StepCode",
    "TreeCaptureHooks",
    "TreeParts",
    "TreeSpec",
    "below_autograd",
    "builtin_scan",
    "builtin_while_loop",
    "capture_with_dynamo",
    "compile_step",
    "fake_results",
    "implement",
    "is_tracing",
    "is_transforming",
    "keystr",
    "numbers_of_a_step",
    "outside_of_tracing",
    "refuse_autograd",
    "register_with_dynamo",
    "trace_step",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
    "unlogged",
    "watch_operators",
    "why_dynamo_cannot_capture",
]

warn_if_newer("torch")
