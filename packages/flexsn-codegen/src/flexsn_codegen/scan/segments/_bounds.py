"""Starts and ends of segments, in whole chunks. The numbers of chunks of two segments differ by at most one.

The steps after the last complete chunk belong to the last segment.
"""

from __future__ import annotations

from flexsn_codegen.targets import KernelWriter

# The number of segments whose rows are loaded together by a program that walks the segments one after the other.
TOGETHER = 8


def define_bounds(writer: KernelWriter, segment: str) -> None:
    """Defines `first`, a segment's first chunk, and `behind`, the chunk after its last chunk."""
    writer.integer("first", f"{segment} * chunks // SEGMENTS")
    writer.integer("behind", f"({segment} + 1) * chunks // SEGMENTS")


def divide_segment(writer: KernelWriter, chunk: int, *, ends: bool) -> None:
    """Divides a segment of a step function with inputs that count down.

    The division depends on `least` and `largest`, the smallest and the largest count of the program's elements. No
    element ends before chunk `whole`. Before chunk `alive`, all elements end, or the segment ends. Chunk `stop`
    follows the segment's last chunk, which may be the incomplete chunk at the end of the sequence.

    Args:
        ends: True if steps have ends (`ForwardSpec.ends`). If False, `alive` is `stop`.
    """
    writer.integer("full", at_least(f"least // {chunk}", "first"))
    writer.integer("whole", at_most("full", "behind"))
    writer.integer("stop", f"behind + (behind == chunks) * ((T + {chunk - 1}) // {chunk} - chunks)")
    if ends:
        writer.integer("reach", at_least(f"(largest + {chunk - 1}) // {chunk}", "whole"))
        writer.integer("alive", at_most("reach", "stop"))
    else:
        writer.integer("alive", "stop")


def at_least(value: str, bound: str) -> str:
    return f"{bound} + ({value} > {bound}) * ({value} - {bound})"


def at_most(value: str, bound: str) -> str:
    return f"{bound} + ({value} < {bound}) * ({value} - {bound})"
