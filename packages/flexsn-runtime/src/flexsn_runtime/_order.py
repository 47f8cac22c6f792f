"""The order in which a scan goes over the elements of a step: that of an input in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flexsn_graph import LiftedLayout
from flexsn_runtime._torch_private import size_hint


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The dimensions of a step, sorted: an input that is channels-last in memory is read one element after the other.

    Attributes:
        dims: dimensions of a step, the one with the largest stride first.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, sequence: Tensor) -> StepOrder:
        """That of `[T, *step]`; a dimension of size 1 keeps its place."""
        strides = [size_hint(stride) for stride in sequence.stride()[1:]]
        fixed = [d for d, size in enumerate(sequence.shape[1:]) if size == 1 or not strides[d]]
        moved = [d for d in range(len(strides)) if d not in fixed]
        by_stride = iter(sorted(moved, key=lambda d: strides[d] or 0, reverse=True))
        return cls(tuple(d if d in fixed else next(by_stride) for d in range(len(strides))))

    def sequence(self, tensor: Tensor) -> Tensor:
        """`[T, *step]` in this order; one that broadcasts to it gets all dimensions."""
        missing = len(self.dims) + 1 - tensor.dim()
        full = tensor[(slice(None), *(None,) * missing)] if missing else tensor
        return full.permute(0, *(d + 1 for d in self.dims))

    def step(self, tensor: Tensor) -> Tensor:
        """`[*step]` in this order."""
        return tensor.permute(self.dims)

    def either(self, tensor: Tensor) -> Tensor:
        """A sequence or a step, by the number of its dimensions."""
        return self.step(tensor) if tensor.dim() == len(self.dims) else self.sequence(tensor)

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[d] for d in self.dims)

    def layout(self, layout: LiftedLayout) -> LiftedLayout:
        return LiftedLayout(self.shape(layout.strides), layout.offset)

    def back(self, tensor: Tensor) -> Tensor:
        """`[*step]` or `[T, *step]` (or `[rows, *step]`) from this order."""
        lead = tensor.dim() - len(self.dims)
        inverse = sorted(range(len(self.dims)), key=lambda i: self.dims[i])
        return tensor.permute(*range(lead), *(lead + i for i in inverse))
