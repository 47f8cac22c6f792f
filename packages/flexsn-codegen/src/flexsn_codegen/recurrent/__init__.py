"""Kernels of recurrent steps: one launch for all T, with products and the exchange of their operands inside."""

from __future__ import annotations

from flexsn_codegen.recurrent._loop import Call, Exchange, Loop, Multiply, NotOneLaunchError, loop_of
from flexsn_codegen.recurrent._triton import (
    COUNTER_DISTANCE,
    Load,
    LoopKernel,
    LoopSpec,
    Place,
    Tiles,
    loop_source,
    memory_of,
    two_strides,
)

__all__ = [
    "COUNTER_DISTANCE",
    "Call",
    "Exchange",
    "Load",
    "Loop",
    "LoopKernel",
    "LoopSpec",
    "Multiply",
    "NotOneLaunchError",
    "Place",
    "Tiles",
    "loop_of",
    "loop_source",
    "memory_of",
    "two_strides",
]
