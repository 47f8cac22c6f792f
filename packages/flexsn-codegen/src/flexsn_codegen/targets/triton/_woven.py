"""Triton kernels with interleaved results, such as the three colours of pixels.

A program writes adjacent elements of all results. If it stored each result separately, each store would write only
every third element, and would access all of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexsn_codegen.source._source import DENSE, CoreSource, KernelSource
from flexsn_codegen.targets._base import Target
from flexsn_codegen.targets.triton._writer import TritonWriter


def woven_kernel(target: Target, name: str, core: CoreSource, layouts: Sequence[Any], count: int) -> KernelSource:
    """Implements `Target.woven_kernel`."""
    # The layout of a group's first result is `DENSE` if the results of the group fill one contiguous range of memory.
    writer = TritonWriter(target, (), ["N"])
    writer.line("lane = dev.narrow(tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), N)")
    writer.line("mask = lane < N")
    writer.line(f"cell = lane % {count}")
    writer.line(f"off = (lane // {count}).to(tl.int64)")
    arguments, firsts = len(core.arguments), core.results[::count]
    ports = writer.add_operands((*core.arguments, *firsts), layouts)
    numbers = writer.add_numbers(core)
    for port in ports[:arguments]:
        writer.load(port.name, port)
    writer.call([port.name for port in core.results], core, [*(port.name for port in ports[:arguments]), *numbers])
    for group, first in enumerate(firsts):
        results = core.results[group * count : (group + 1) * count]
        text = results[-1].name
        for i in range(count - 2, -1, -1):
            text = f"tl.where(cell == {i}, {results[i].name}, {text})"
        writer.line(f"{first.name}_woven = {text}")
        if layouts[arguments + group] == DENSE:
            writer.line(f"dev.store({first.name}_ptr + lane, {first.name}_woven, mask)")
        else:
            writer.store(first, f"{first.name}_woven", f"{first.name}_ptr + cell")
    return writer.finish(name, [core], "One program: BLOCK elements of interleaved results.")
