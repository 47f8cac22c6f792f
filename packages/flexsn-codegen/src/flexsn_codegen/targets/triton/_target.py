"""The target Triton."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from flexsn_codegen.source._cache import compile_triton_code_str
from flexsn_codegen.source._dtypes import NARROW_DTYPES, rounding
from flexsn_codegen.source._source import CoreSource, KernelSource, Strided
from flexsn_codegen.source._walk import by_runs, by_terms
from flexsn_codegen.targets._base import Approximate, KernelWriter, RowLaunch, Statement, Summed, Target
from flexsn_codegen.targets.triton._functions import FAST
from flexsn_codegen.targets.triton._literals import is_supported, literal
from flexsn_codegen.targets.triton._row_kernel import row_kernel, row_launch, walk_rows
from flexsn_codegen.targets.triton._rules import RULES
from flexsn_codegen.targets.triton._woven import woven_kernel
from flexsn_codegen.targets.triton._writer import TritonWriter

_APPROXIMATE = {Approximate.DIVISION: ("div",), Approximate.EVERYTHING: FAST}


class Triton(Target):
    """The target whose sources are modules of `@triton.jit` functions on blocks of values. They call `dev.<name>`."""

    name = "Triton"
    rows = True
    segments = True
    reduces_rows = True
    weaves = True
    most_columns = 4096
    reserved = frozenset({"dev", "float", "tl", "triton"})
    header = """import triton
import triton.language as tl

from flexsn_codegen.targets.triton import device as dev
"""

    def __init__(self) -> None:
        super().__init__()
        self.rules |= RULES

    def supports(self, dtype: torch.dtype) -> bool:
        return is_supported(dtype)

    def literal(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return literal(value, dtype)

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        return f"dev.round_{rounding(dtype)}({text})" if dtype in NARROW_DTYPES else text

    def filled(self, number: str, like: str) -> str:
        return f"tl.broadcast_to({number}, {like}.shape)"

    def approximated(self, text: str, approximate: Approximate) -> str:
        functions = _APPROXIMATE.get(approximate)
        return re.sub(rf"\bdev\.({'|'.join(functions)})\(", r"dev.fast_\1(", text) if functions else text

    def function(
        self, name: str, arguments: Sequence[str], statements: Sequence[Statement], results: Sequence[str]
    ) -> str:
        lines = [f"{s.name} = {s.text}" + (f"  # {s.citation}" if s.citation else "") for s in statements]
        body = "\n".join(f"    {line}" for line in (*lines, f"return {', '.join(results)}"))
        return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}\n"

    def writer(self, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        return TritonWriter(self, strided, sizes)

    def walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        return by_runs(sizes, strides)

    def plain_walk(self, sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[Any, ...], list[int]]:
        return by_terms(sizes, strides)

    def woven_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], count: int) -> KernelSource:
        return woven_kernel(self, name, core, layouts, count)

    def row_launch(self, core: CoreSource, count: int, width: int, *, reduces: bool, sums: bool) -> RowLaunch:
        return row_launch(core, count, width, reduces=reduces, sums=sums)

    def walk_rows(
        self,
        sizes: Sequence[int],
        strides: Sequence[Sequence[int]],
        split: int,
        launch: RowLaunch,
        sums: Sequence[Summed],
        after: Sequence[int | None],
    ) -> tuple[tuple[Any, ...], list[int]]:
        return walk_rows(sizes, strides, split, launch, sums, after)

    def row_kernel(self, name: str, core: CoreSource, layouts: Sequence[Any], *, may_overlap: bool) -> KernelSource:
        return row_kernel(self, name, core, layouts)

    def compile(self, source: KernelSource) -> Any:
        return compile_triton_code_str(source.source, source.name)


TRITON = Triton()
