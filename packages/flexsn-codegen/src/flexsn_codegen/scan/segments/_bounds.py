"""Where segments of time begin and end: at multiples of a chunk, and as long as each other up to one chunk."""

from __future__ import annotations

from flexsn_codegen.targets import KernelWriter

# Rows of segments that are loaded together, where a program walks one after the other.
TOGETHER = 8


def bounds(writer: KernelWriter, segment: str) -> None:
    """Names the first chunk of a segment `first`, and the one after its last `behind`; `chunks` has a name."""
    writer.integer("first", f"{segment} * chunks // SEGMENTS")
    writer.integer("behind", f"({segment} + 1) * chunks // SEGMENTS")
