"""Where segments of time begin and end: at multiples of a chunk, and as long as each other up to one chunk."""

from __future__ import annotations

from flexsn_codegen.targets import KernelWriter

# Rows of segments that are loaded together, where a program walks one after the other.
TOGETHER = 8


def bounds(writer: KernelWriter, segment: str) -> None:
    """Names the first chunk of a segment `first`, and the one after its last `behind`; `chunks` has a name."""
    writer.integer("first", f"{segment} * chunks // SEGMENTS")
    writer.integer("behind", f"({segment} + 1) * chunks // SEGMENTS")


def reached(writer: KernelWriter, chunk: int, *, ends: bool) -> None:
    """Names the parts of a segment where inputs count down, from `least` and `largest` of them at its elements.

    No element ends before chunk `whole`, and none goes on from chunk `alive` on. Chunk `stop` is the one after the
    segment's last, which may have what is left of `T`.

    Args:
        ends: True if nothing happens once all elements have ended; otherwise `alive` is `stop`.
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
