"""Launches, by what a kernel is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexsn_codegen.targets.cpp import CppKernel
from flexsn_runtime.launches._cpp_launch import CppLaunch
from flexsn_runtime.launches._cpp_op import RecordedCpp, RecordedCppLaunch
from flexsn_runtime.launches._entry import Entry
from flexsn_runtime.launches._launch import Launch as TritonLaunch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.step._specialization import CompiledKernel


class Launch(Protocol):
    """Runs a kernel over one number of elements and steps, as often as it is called."""

    @property
    def is_compiled(self) -> bool:
        """Whether there is nothing to compile any more."""

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """What allocates a tensor that it writes, for each call another one."""

    def entry(self) -> Entry | None:
        """How it is launched by its address, without Python; `None`: it cannot be, or not yet."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles for tensors like these in dtype and alignment, without launching."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches; `tensors` are in the order of the kernel's parameters."""


def launch(kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device) -> Launch:
    """What runs a kernel.

    Args:
        sizes: at least the kernel's integer arguments.
        device: of the tensors that it will be called with.
    """
    if isinstance(kernel.function, RecordedCpp):
        return RecordedCppLaunch(kernel.function.kernel, [sizes[name] for name in kernel.sizes], config.block)
    if isinstance(kernel.function, CppKernel):
        return CppLaunch(kernel, sizes, config)
    return TritonLaunch(kernel, sizes, config, device)
