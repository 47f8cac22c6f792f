"""The target C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexsn_codegen.source._dtypes import NARROW_DTYPES, rounding
from flexsn_codegen.source._source import CoreSource, KernelSource, Strided
from flexsn_codegen.targets._base import KernelWriter, RowLaunch, Statement, Summed, Target
from flexsn_codegen.targets.cpp._kernel import CppKernel
from flexsn_codegen.targets.cpp._literals import is_supported, literal
from flexsn_codegen.targets.cpp._pointwise import pointwise, walk
from flexsn_codegen.targets.cpp._row_kernel import row_kernel, row_launch, walk_rows
from flexsn_codegen.targets.cpp._rules import RULES
from flexsn_codegen.targets.cpp._writer import CppWriter

_KEYWORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept
    const constexpr const_cast continue decltype default delete do double dynamic_cast else enum
    explicit export extern false float for friend goto if inline int long mutable namespace new
    noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
    wchar_t while xor xor_eq dev std main lane
"""


class Cpp(Target):
    """The target whose sources are C++17.

    A source contains functions of one element, which call `dev::<name>`, and a kernel, which is a template over the
    dtypes of the kernel's tensors.
    """

    name = "C++"
    reserved = frozenset(_KEYWORDS.split())
    segments = True
    reduces_rows = True
    columns_in_runs = True
    keeps_rows = True
    once = True  # the compiler moves nothing out of the loops over lanes, which are inside of the loop over time
    header = '#include "device.h"\n#include "device/lanes.h"\n'

    def __init__(self) -> None:
        super().__init__()
        self.rules |= RULES

    def supports(self, dtype: torch.dtype) -> bool:
        return is_supported(dtype)

    def literal(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return literal(value, dtype)

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        return f"dev::round_{rounding(dtype)}({text})" if dtype in NARROW_DTYPES else text

    def filled(self, number: str, like: str) -> str:
        return number

    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        types = ", ".join(f"typename T{i}" for i in range(len(arguments)))
        parameters = ", ".join(f"T{i} {argument}" for i, argument in enumerate(arguments))
        lines = [f"const auto {s.name} = {s.text};" + _write_comment(s.citation) for s in statements]
        body = "\n".join(f"    {line}" for line in (*lines, f"return dev::make_tuple({', '.join(results)});"))
        head = f"template <{types}>\n" if arguments else ""
        return f"{head}DEV_INLINE auto {name}({parameters}) {{\n{body}\n}}\n"

    def walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], list[int]]:
        return walk(sizes, strides)

    def pointwise(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        return pointwise(self, name, core, layouts, may_overlap=may_overlap)

    def row_launch(self, core: CoreSource, count: int, width: int, *, reduces: bool, sums: bool) -> RowLaunch:
        return row_launch(count, width, sums=sums)

    def walk_rows(
        self,
        sizes: Sequence[int],
        strides: Sequence[Sequence[int]],
        split: int,
        launch: RowLaunch,
        sums: Sequence[Summed],
        after: Sequence[int | None],
    ) -> tuple[tuple[str, ...], list[int]]:
        return walk_rows(sizes, strides, launch, sums)

    def row_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        return row_kernel(self, name, core, layouts, may_overlap=may_overlap)

    def writer(self, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        return CppWriter(self, strided, sizes)

    def compile(self, source: KernelSource) -> Any:
        return CppKernel(source)


def _write_comment(citation: str) -> str:
    # A backslash at the end of the line would make the next line part of the comment.
    return f"  // {citation.rstrip(chr(92))}" if citation else ""


CPP = Cpp()
