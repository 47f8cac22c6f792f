"""Kernels of recurrent steps: one launch for all T, with products and the exchange of their operands inside."""

from __future__ import annotations

from flexsn_codegen.recurrent._loop import Exchange, Loop, Multiply, NotOneLaunchError, StageCall, loop_of
from flexsn_codegen.recurrent._triton import (
    COUNTER_DISTANCE,
    Load,
    LoopKernel,
    LoopSpec,
    Tiles,
    ValueLayout,
    loop_source,
    memory_of,
    two_strides,
)

__all__ = [
    "COUNTER_DISTANCE",
    "Exchange",
    "Load",
    "Loop",
    "LoopKernel",
    "LoopSpec",
    "Multiply",
    "NotOneLaunchError",
    "StageCall",
    "Tiles",
    "ValueLayout",
    "loop_of",
    "loop_source",
    "memory_of",
    "two_strides",
]
