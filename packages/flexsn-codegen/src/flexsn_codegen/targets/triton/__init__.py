"""The target Triton, for kernels on GPUs and in Triton's interpreter, which is slow."""

from __future__ import annotations

from flexsn_codegen.targets.triton._interpreting import interpreting
from flexsn_codegen.targets.triton._launcher import entry, launcher, on_device, prepare_compiler, prepare_driver
from flexsn_codegen.targets.triton._literals import accumulator
from flexsn_codegen.targets.triton._offline import OfflineJob, ResourceUse, compile_offline
from flexsn_codegen.targets.triton._target import TRITON, Triton

__all__ = [
    "TRITON",
    "OfflineJob",
    "ResourceUse",
    "Triton",
    "accumulator",
    "compile_offline",
    "entry",
    "interpreting",
    "launcher",
    "on_device",
    "prepare_compiler",
    "prepare_driver",
]
