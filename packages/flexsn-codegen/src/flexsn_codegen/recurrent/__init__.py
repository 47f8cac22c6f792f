"""Recurrent steps in one launch for all T: a loop over time that computes products and exchanges their operands.

The targets write the kernels: see `targets/triton/_recurrent.py` and `targets/cuda/_clusters.py`.
"""

from __future__ import annotations

from flexsn_codegen.recurrent._loop import (
    Exchange,
    Loop,
    Multiply,
    NotOneLaunchError,
    Reduce,
    StageCall,
    exact_values,
    loop_of,
)
from flexsn_codegen.recurrent._spec import Load, LoopSpec, ValueLayout, memory_of, two_strides

__all__ = [
    "Exchange",
    "Load",
    "Loop",
    "LoopSpec",
    "Multiply",
    "NotOneLaunchError",
    "Reduce",
    "StageCall",
    "ValueLayout",
    "exact_values",
    "loop_of",
    "memory_of",
    "two_strides",
]
