"""Scan kernels that walk segments of time in parallel, for long sequences with few elements.

Backward: a step's VJP is linear in its cotangents, so a segment is an affine map of the cotangent at its end.
`maps_source` writes these maps, `carried_source` combines them, and `gradient_source` walks all segments with the
cotangent at the end of each segment.

Forward: `speculation_source` starts each segment with a guess of its state, which is the state after a warm-up.
`repair_source` compares each guess bit by bit with the end of the previous segment, and recomputes the segments that
differ. If the states are affine functions of the previous states and bitwise equality is not required,
`state_maps_source`, `starts_source` and `from_starts_source` combine segments as the backward does.
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
