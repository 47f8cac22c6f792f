"""The C++ backend, for the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexsn_codegen.targets.cpp import CPP, why_no_compiler
from flexsn_runtime.backend._backend import Backend
from flexsn_runtime.launches._cpp_launch import CppLaunch
from flexsn_runtime.launches._cpp_op import RecordedCppLaunch
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, StepCost
from flexsn_runtime.plans._cpu_plan import cpu_plan, cpu_size_class
from flexsn_runtime.plans._segments import SegmentRule, for_threads


class CppBackend(Backend):
    name = "cpp"
    target = CPP
    by_address = True

    def why_unavailable(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"kernels in C++ run on the CPU, and the tensors are on {device.type!r}. Use backend='auto'."
        return why_no_compiler()

    def size_class(self, ncl: int) -> int:
        return cpu_size_class(ncl)

    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        return cpu_plan(cpu_size_class(ncl), carried, cost.num_ops, cost.backward_ops)

    def segments(self) -> SegmentRule | None:
        return for_threads(torch.get_num_threads())

    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> CppLaunch:
        return CppLaunch(kernel, sizes, config)

    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> RecordedCppLaunch:
        return RecordedCppLaunch(kernel.function, [sizes[name] for name in kernel.sizes], config.block)
