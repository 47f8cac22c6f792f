"""Starts and ends of segments of time. They are multiples of a chunk. Lengths differ by at most one chunk."""

from __future__ import annotations

from flexsn_codegen.targets import KernelWriter

# Number of segments whose rows are loaded together in a program that walks the segments one after the other.
TOGETHER = 8


def bounds(writer: KernelWriter, segment: str) -> None:
    """Defines `first`, a segment's first chunk, and `behind`, the chunk after its last one, from `chunks`."""
    writer.integer("first", f"{segment} * chunks // SEGMENTS")
    writer.integer("behind", f"({segment} + 1) * chunks // SEGMENTS")


def reached(writer: KernelWriter, chunk: int, *, ends: bool) -> None:
    """Defines the parts of a segment if inputs count down, from the `least` and `largest` count of its elements.

    No element ends before chunk `whole`, and all have ended at chunk `alive`. Chunk `stop` is the one after the
    segment's last chunk, which may be the rest of `T`.

    Args:
        ends: True if nothing happens after all elements have ended. If False, `alive` is `stop`.
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
