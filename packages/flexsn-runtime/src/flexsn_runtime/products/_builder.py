"""Plans of products, put together: what is allocated and launched, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_runtime.calls._plan import Allocation, Launched, Plan, PlanStep, RowsSummed, Unbound
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.launches._written_kernels import PreparedKernel


class PlanBuilder:
    """Makes a plan for `given` tensors: places of memory are counted from them on."""

    def __init__(self, device: torch.device, given: int) -> None:
        self._device, self._given = device, given
        self._allocations: list[Allocation | None] = []
        self._steps: list[PlanStep] = []
        self._behind = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> int:
        """The place of a tensor that a call allocates; dense unless `strides` are given."""
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        self._allocations.append(Allocation(tuple(shape), tuple(strides), dtype))
        return self._given + len(self._allocations) - 1

    def reserve(self) -> int:
        """The place of a result that a step puts there."""
        self._allocations.append(None)
        return self._given + len(self._allocations) - 1

    def launch(self, kernel: PreparedKernel, *places: int) -> None:
        self._steps.append(Launched.of(kernel, places))

    def sum_rows(self, place: int, into: int) -> None:
        self._steps.append(RowsSummed(place, into))

    def unbind(self, place: int, count: int) -> tuple[int, ...]:
        """Places of the slices of a tensor. Nothing is allocated after it."""
        first = self._given + len(self._allocations) + self._behind
        self._steps.append(Unbound(place))
        self._behind += count
        return tuple(range(first, first + count))

    def plan(self) -> Plan:
        return Plan.of(self._device, self._allocations, self._steps, allocator)
