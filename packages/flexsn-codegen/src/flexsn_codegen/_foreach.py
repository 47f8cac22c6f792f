"""A kernel over lists of tensors, as an optimizer goes over a model's: on a GPU, one launch for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._kernel import PREFIX, Kernel, Launch, Variant
from flexsn_codegen._launch import BLOCK, interpreted, launch
from flexsn_codegen._numerics import compile_options
from flexsn_codegen._source import KernelSource
from flexsn_codegen.targets.triton import TRITON
from flexsn_codegen.targets.triton._table import ALIGNMENT, over_table

_MAX_STEPS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Launches that are one: of equal kernels, on dense tensors of the same dtypes.

    Attributes:
        variant: gives the words of the numbers.
        kernel: walks a table.
        table: see `_table`.
    """

    variant: Variant
    kernel: Any
    table: Tensor
    fast_math: bool

    def launch(self, numbers: Sequence[Any]) -> None:
        """Launches with these numbers."""
        words = self.variant.integers(numbers)
        grid = (self.table.shape[0],)
        if interpreted():
            self.kernel[grid](self.table, *words, BLOCK=BLOCK)
            return
        options = compile_options("hip" if torch.version.hip else "cuda", fast_math=self.fast_math)
        with torch.cuda.device(self.table.device):
            self.kernel[grid](self.table, *words, BLOCK=BLOCK, **options)


@dataclass(frozen=True, slots=True)
class Step:
    """A call over lists that can be made again with the same tensors: it holds where they are, and not them.

    Attributes:
        groups: its launches.
        fetched: how captured tensors are looked up, and what they were.
        written: the addresses of the tensors that it writes.
    """

    groups: Sequence[Group]
    fetched: Sequence[tuple[Callable[[], tuple[Tensor, ...] | None], tuple[Tensor, ...]]]
    written: frozenset[int]

    def fits(self, numbers: Sequence[Any]) -> bool:
        """Whether it serves a call with these numbers, of a function that reads what it read."""
        for fetch, before in self.fetched:
            now = fetch()
            if now is None or len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                return False
        return all(group.variant.fits(numbers) for group in self.groups)

    def run(self, numbers: Sequence[Any]) -> None:
        """Launches all with these numbers."""
        for group in self.groups:
            group.launch(numbers)


@dataclass(slots=True)
class Steps:
    """Calls over lists that have been made, and the kernels that walk tables."""

    kernels: dict[tuple[str, tuple[torch.dtype, ...], bool], Any] = field(default_factory=dict)
    known: dict[tuple[Any, ...], Step] = field(default_factory=dict)

    def keep(self, key: tuple[Any, ...], step: Step) -> None:
        """Keeps a step, for calls with tensors in the same places."""
        if len(self.known) >= _MAX_STEPS:
            self.known.pop(next(iter(self.known)))
        self.known[key] = step

    def run_all(
        self, launches: Sequence[tuple[Kernel, Variant, Launch]], numbers: Sequence[Any]
    ) -> list[Group] | None:
        """Runs launches of one function: together, where that is possible.

        Returns:
            The launches; `None` if some were for themselves.
        """
        alike: dict[tuple[Any, ...], list[tuple[Kernel, Variant, Launch]]] = {}
        all_grouped = True
        for kernel, variant, todo in launches:
            source = todo.built.source
            if todo.numel == 0:
                continue
            if source.target is TRITON and len(todo.numbers) == 1 + len(_words(source)):
                dtypes = tuple(t.dtype for t in todo.tensors)
                key = (source.name, dtypes, _is_aligned(todo), todo.tensors[0].device)
                alike.setdefault(key, []).append((kernel, variant, todo))
                continue
            all_grouped = False
            fast_math = kernel.numerics.fast_math
            launch(source.target, todo.built.compiled(), todo.tensors, todo.numbers, todo.numel, fast_math=fast_math)
        groups = []
        for (name, dtypes, aligned, device), group in alike.items():
            kernel, variant, todo = group[0]
            known = self.kernels.get((name, dtypes, aligned))
            if known is None:
                source = todo.built.source
                known = TRITON.compile(over_table(source, dtypes, _words(source), aligned=aligned))
                self.kernels[name, dtypes, aligned] = known
            table = _table([one for _, _, one in group], device)
            groups.append(Group(variant, known, table, kernel.numerics.fast_math))
            groups[-1].launch(numbers)
        return groups if all_grouped else None


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_aligned(todo: Launch) -> bool:
    """Whether the tensors can be read and written in vectors."""
    return todo.numel % ALIGNMENT == 0 and all(t.data_ptr() % ALIGNMENT == 0 for t in todo.tensors)


def _words(source: KernelSource) -> list[str]:
    """The integers of a dense kernel that hold numbers of the function's."""
    return [name for name in source.sizes if name.startswith(f"{PREFIX}_number_")]


def _table(group: Sequence[Launch], device: torch.device) -> Tensor:
    """`[programs, 2 + tensors]`: the first element, the number of elements, and the tensors' addresses."""
    rows = []
    for todo in group:
        programs = -(-todo.numel // BLOCK)
        addresses = torch.tensor([todo.numel, *[t.data_ptr() for t in todo.tensors]], dtype=torch.int64, device="cpu")
        first = torch.arange(programs, dtype=torch.int64, device="cpu") * BLOCK
        rows.append(torch.cat([first[:, None], addresses.expand(programs, -1)], dim=1))
    table = torch.cat(rows)
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
