"""Scan kernels that walk segments of time in parallel, for long sequences with few elements.

Backward: a step's VJP is linear in its cotangents, so a segment is an affine map of the cotangents at its end.
`maps_source` writes the kernel that computes these maps. `carried_source` writes the kernel that combines the maps into
the cotangents at the end of each segment. `gradient_source` writes the kernel that walks all segments from these
cotangents.

Forward: `speculation_source` writes the kernel that starts each segment with a guess of the states, which is the result
of a warm-up. `repair_source` writes the kernel that compares each guess bit by bit with the states at the end of the
previous segment, and recomputes the segments whose guess is wrong. If the states are affine functions of the previous
states, and bitwise equality is not required, segments are combined in the same way as in the backward, by the kernels
of `state_maps_source`, `starts_source` and `from_starts_source`.
"""

from __future__ import annotations

from flexsn_codegen.scan.segments._affine import from_starts_source, starts_source, state_maps_source
from flexsn_codegen.scan.segments._backward import Columns, carried_source, gradient_source, map_size, maps_source
from flexsn_codegen.scan.segments._forward import ended_source, repair_source, speculation_source

__all__ = [
    "Columns",
    "carried_source",
    "ended_source",
    "from_starts_source",
    "gradient_source",
    "map_size",
    "maps_source",
    "repair_source",
    "speculation_source",
    "starts_source",
    "state_maps_source",
]
