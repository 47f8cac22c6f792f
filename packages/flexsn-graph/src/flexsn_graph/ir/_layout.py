"""The map from elements of the step to elements of a lifted tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiftedLayout:
    """The elements of a lifted tensor that a step reads.

    Element `(i_0, i_1, …)` of the step reads element `offset + Σ i_d * strides[d]` of the lifted tensor, which is
    contiguous. A stride of 0 marks a broadcast dimension.
    """

    strides: tuple[int, ...]
    offset: int
