"""Kernels of recurrent steps: one launch for all T, with products and the exchange of their operands inside."""

from __future__ import annotations

from flexsn_codegen.recurrent._loop import Call, Exchange, Loop, Multiply, NotOneLaunchError, loop_of
from flexsn_codegen.recurrent._spec import Load, LoopSpec, Place, memory_of, two_strides
from flexsn_codegen.targets.triton._recurrent import COUNTER_DISTANCE, LoopKernel, Tiles, loop_source

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
