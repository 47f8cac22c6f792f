"""A kernel over lists of tensors, as an optimizer goes over a model's: on a GPU, one launch for all that are alike."""

from __future__ import annotations

import re
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
from flexsn_codegen.targets.triton._literals import tl_name

_MAX_STEPS = 16
# In bytes and in elements: with these known, Triton moves vectors, as it does where it sees the arguments themselves.
_ALIGNMENT = 16


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
                known = TRITON.compile(over_table(todo.built.source, dtypes, aligned=aligned))
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
    return todo.numel % _ALIGNMENT == 0 and all(t.data_ptr() % _ALIGNMENT == 0 for t in todo.tensors)


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


def over_table(source: KernelSource, dtypes: Sequence[torch.dtype], *, aligned: bool) -> KernelSource:
    """A Triton kernel of dense tensors as one whose programs find their tensors in a table.

    Args:
        aligned: see `_is_aligned`, for all rows of the table.
    """
    name = f"{source.name}_foreach{'_aligned' if aligned else ''}"

    def known(text: str, factor: int) -> str:
        return f"tl.multiple_of({text}, {factor})" if aligned else text

    pointers = [f"{port.name}_ptr" for port in source.params]
    words = _words(source)
    types = [f"tl.pointer_type({tl_name(torch.int8 if dtype == torch.bool else dtype)})" for dtype in dtypes]
    lines = [
        f"    row = table_ptr + tl.program_id(0).to(tl.int64) * {2 + len(pointers)}",
        f"    N = {known('tl.load(row + 1)', _ALIGNMENT)}",
    ]
    for i, (pointer, kind) in enumerate(zip(pointers, types, strict=True)):
        lines.append(f"    {pointer} = {known(f'tl.load(row + {2 + i}).to({kind})', _ALIGNMENT)}")
    offsets = f"    off = {known('tl.load(row)', _ALIGNMENT)} + tl.arange(0, BLOCK)"
    signature = ", ".join(["table_ptr", *words, "BLOCK: tl.constexpr"])
    start = source.source.rindex("@triton.jit")
    head, kernel = source.source[:start], source.source[start:]
    body = kernel.split('"""', 2)[2]
    body = re.sub(r"^    off = tl\.program_id\(0\).*$", offsets, body, count=1, flags=re.MULTILINE)
    skipped = ", ".join(f'"{word}"' for word in words)
    decorator = f"@triton.jit(do_not_specialize=[{skipped}])" if skipped else "@triton.jit"
    text = "\n".join([f"{decorator}\ndef {name}({signature}):", *lines]) + body
    return KernelSource(name, head + text, source.params, tuple(words), source.target)
