"""Scan kernels that walk segments of time side by side, for long sequences of few elements.

Backward: a step's VJP is linear in its cotangents, so a segment is an affine map of the cotangent at its end.
`maps_source` writes these maps, `carried_source` combines them, `gradient_source` walks all segments with the cotangent
at the end of each. Forward: `speculation_source` begins each segment with a guess of its state, the state after a
warm-up, and `repair_source` compares each guess, bit by bit, with the end of the segment before it and computes again
what differs. Where the states are affine functions of those before and exactness to the last bit is not required,
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
