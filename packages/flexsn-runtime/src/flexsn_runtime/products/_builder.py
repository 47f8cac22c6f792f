"""Builds plans of matrix products: allocations and launches, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_runtime.calls._plan import Allocation, Launched, Plan, PlanStep, RowsSummed, Unbound
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.launches._written_kernels import PreparedKernel


class PlanBuilder:
    """Builds a plan for `num_arguments` tensors, which take the first places in memory."""

    def __init__(self, device: torch.device, num_arguments: int) -> None:
        self._device, self._num_arguments = device, num_arguments
        self._allocations: list[Allocation | None] = []
        self._steps: list[PlanStep] = []
        self._num_unbound = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> int:
        """Adds an allocation of a tensor, and returns its place. If `strides` is `None`, the tensor is contiguous."""
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        self._allocations.append(Allocation(tuple(shape), tuple(strides), dtype))
        return self._num_arguments + len(self._allocations) - 1

    def reserve(self) -> int:
        """Returns a place for a result that a later step stores."""
        self._allocations.append(None)
        return self._num_arguments + len(self._allocations) - 1

    def launch(self, kernel: PreparedKernel, *places: int) -> None:
        self._steps.append(Launched.of(kernel, places))

    def sum_rows(self, place: int, into: int) -> None:
        self._steps.append(RowsSummed(place, into))

    def unbind(self, place: int, count: int) -> tuple[int, ...]:
        """Unbinds a tensor. Returns the places of its slices. No tensor may be allocated afterwards."""
        first = self._num_arguments + len(self._allocations) + self._num_unbound
        self._steps.append(Unbound(place))
        self._num_unbound += count
        return tuple(range(first, first + count))

    def plan(self) -> Plan:
        return Plan.of(self._device, self._allocations, self._steps, allocator)
