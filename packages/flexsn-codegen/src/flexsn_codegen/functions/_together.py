"""Merges launches of one kernel on many tensors into one launch, whose programs read addresses from a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.functions._kernel import PREFIX
from flexsn_codegen.functions._launch import BLOCK, interpreted
from flexsn_codegen.functions._plan import PlannedLaunch, Trace
from flexsn_codegen.source._numerics import compile_options
from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets.triton import TRITON, interpreting
from flexsn_codegen.targets.triton._table import ALIGNMENT, over_table


@dataclass(slots=True)
class Group:
    """Launches of one kernel on dense tensors of the same dtypes, merged into one launch.

    Attributes:
        variant: the trace that encodes the function's numbers as integers.
        kernel: a kernel that reads addresses from a table.
        first: `[programs, 2]`, int64, on the tensors' device: each program's first element, and the number of elements
            of the program's tensors.
        cells: `[programs, tensors]`, int64, on the tensors' device: the positions of each program's addresses among all
            addresses.
        aligned: `[launches, tensors]`, int64, on the CPU: positions of the addresses that have to be multiples of
            `ALIGNMENT`.
        table: `[programs, 2 + tensors]`: `first`, and the addresses.
    """

    variant: Trace
    kernel: Any
    fast_math: bool
    first: Tensor
    cells: Tensor
    aligned: Tensor | None
    table: Tensor

    def fits(self, addresses: Tensor) -> bool:
        """True if the kernel is valid for tensors at these addresses. `addresses` is on the CPU."""
        return self.aligned is None or not bool((addresses[self.aligned] % ALIGNMENT).any())

    def place(self, addresses: Tensor) -> None:
        """Creates the table for tensors at these addresses. `addresses` is on the tensors' device."""
        self.table = torch.cat([self.first, addresses[self.cells]], dim=1)

    def launch(self, words: Sequence[int]) -> None:
        """Launches the kernel with the integers of the function's numbers."""
        grid = (self.table.shape[0],)
        if interpreted():
            with interpreting():
                self.kernel[grid](self.table, *words, BLOCK=BLOCK)
            return
        options = compile_options("hip" if torch.version.hip else "cuda", fast_math=self.fast_math)
        with torch.cuda.device(self.table.device):
            self.kernel[grid](self.table, *words, BLOCK=BLOCK, **options)


@dataclass(frozen=True, slots=True)
class Member:
    """A launch that may become part of a group.

    Attributes:
        cells: the position of each of the kernel's tensors among all tensors and results.
    """

    variant: Trace
    launch: PlannedLaunch
    cells: list[int]
    dtypes: tuple[torch.dtype, ...]

    @property
    def can_join(self) -> bool:
        """True if the launch can be part of a group: the kernel is in Triton, and the tensors are dense."""
        source = self.launch.built.source
        return source.target is TRITON and len(self.launch.integers) == 1

    def key(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        """A key that is equal for launches that can be merged."""
        aligned = self.launch.numel % ALIGNMENT == 0
        aligned = aligned and not any(addresses[cell] % ALIGNMENT for cell in self.cells if addresses[cell])
        return self.launch.built.source.name, self.dtypes, aligned, tuple(self.variant.steps[0].slots)


class TableKernels:
    """Kernels of one function that read addresses from a table."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def group(self, members: Sequence[Member], *, aligned: bool, device: torch.device) -> Group:
        """Merges launches with equal keys. `Group.place` creates the table later."""
        member = members[0]
        source = member.launch.built.source
        key = (source.name, member.dtypes, aligned)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = TRITON.compile(over_table(source, member.dtypes, _list_number_names(source), aligned=aligned))
            self._kernels[key] = kernel
        first, cells = [], []
        for group_member in members:
            start = torch.arange(0, group_member.launch.numel, BLOCK, dtype=torch.int64, device="cpu")
            numel = torch.full_like(start, group_member.launch.numel)
            first.append(torch.stack([start, numel], dim=1))
            cells.append(torch.tensor([group_member.cells] * len(start), dtype=torch.int64, device="cpu"))
        aligned_cells = (
            torch.tensor([group_member.cells for group_member in members], dtype=torch.int64, device="cpu")
            if aligned
            else None
        )
        first_and_numel = torch.cat(first).to(device)
        return Group(
            member.variant,
            kernel,
            member.launch.fast_math,
            first_and_numel,
            torch.cat(cells).to(device),
            aligned_cells,
            first_and_numel,
        )


def _list_number_names(source: KernelSource) -> list[str]:
    """The names of the integer arguments of a dense kernel that contain the function's numbers."""
    return [name for name in source.sizes if name.startswith(f"{PREFIX}_number_")]
