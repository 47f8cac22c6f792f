"""Launch choices, by what kernels are written in."""

from __future__ import annotations

from typing import Protocol

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._targets import TargetName
from flexsn_runtime.plans._buckets import LaunchPlan, StepCost, launch_plan, size_class
from flexsn_runtime.plans._cpu_plan import cpu_plan, cpu_size_class


class Planner(Protocol):
    """How the kernels of a language are launched."""

    def size_class(self, ncl: int) -> int:
        """The largest step that is launched like one of `ncl` elements."""

    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        """The launches for a step of `ncl` elements.

        Args:
            carried: bytes per element of the states.
        """


class _OnGpu:
    def size_class(self, ncl: int) -> int:
        return size_class(ncl)

    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        return launch_plan(ncl, cost, interpreted=triton_interpreted())


class _OnCpu:
    def size_class(self, ncl: int) -> int:
        return cpu_size_class(ncl)

    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        return cpu_plan(cpu_size_class(ncl), carried, cost.num_ops, cost.backward_ops)


PLANNERS: dict[TargetName, Planner] = {"triton": _OnGpu(), "cpp": _OnCpu()}
