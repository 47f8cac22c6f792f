"""Kernels that read the addresses of their tensors from a table, instead of receiving the tensors as arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets.triton._literals import tl_name

# If all addresses are multiples of this number of bytes, and all counts are multiples of this number of elements,
# Triton loads and stores vectors, as for tensors that are arguments.
ALIGNMENT = 16


def over_table(
    source: KernelSource, dtypes: Sequence[torch.dtype], words: Sequence[str], *, aligned: bool
) -> KernelSource:
    """Rewrites a Triton kernel of dense tensors as a kernel whose programs read the addresses from a table.

    Args:
        dtypes: dtypes of the tensors.
        words: names of the integers that the kernel takes after the table.
        aligned: True if all addresses and counts in the table are multiples of `ALIGNMENT`.
    """
    name = f"{source.name}_foreach{'_aligned' if aligned else ''}"

    def mark_multiple(text: str, factor: int) -> str:
        return f"tl.multiple_of({text}, {factor})" if aligned else text

    pointers = [f"{port.name}_ptr" for port in source.params]
    types = [f"tl.pointer_type({tl_name(torch.int8 if dtype == torch.bool else dtype)})" for dtype in dtypes]
    lines = [
        f"    row = table_ptr + tl.program_id(0).to(tl.int64) * {2 + len(pointers)}",
        f"    N = {mark_multiple('tl.load(row + 1)', ALIGNMENT)}",
    ]
    for i, (pointer, kind) in enumerate(zip(pointers, types, strict=True)):
        lines.append(f"    {pointer} = {mark_multiple(f'tl.load(row + {2 + i}).to({kind})', ALIGNMENT)}")
    offsets = f"    off = {mark_multiple('tl.load(row)', ALIGNMENT)} + tl.arange(0, BLOCK)"
    signature = ", ".join(["table_ptr", *words, "BLOCK: tl.constexpr"])
    start = source.source.rindex("@triton.jit")
    head, kernel = source.source[:start], source.source[start:]
    body = kernel.split('"""', 2)[2]
    body = re.sub(r"^    off = tl\.program_id\(0\).*$", offsets, body, count=1, flags=re.MULTILINE)
    skipped = ", ".join(f'"{word}"' for word in words)
    decorator = f"@triton.jit(do_not_specialize=[{skipped}])" if skipped else "@triton.jit"
    text = "\n".join([f"{decorator}\ndef {name}({signature}):", *lines]) + body
    return KernelSource(name, head + text, source.params, tuple(words), source.target)
