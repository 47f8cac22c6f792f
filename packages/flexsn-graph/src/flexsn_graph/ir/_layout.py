"""How each element of the step finds its element of a lifted tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiftedLayout:
    """How a step reads a lifted tensor.

    Element `(i_0, i_1, …)` of the step reads element `offset + Σ i_d * strides[d]` of the lifted tensor,
    laid out contiguously. A stride of 0 is a broadcast dimension.
    """

    strides: tuple[int, ...]
    offset: int
