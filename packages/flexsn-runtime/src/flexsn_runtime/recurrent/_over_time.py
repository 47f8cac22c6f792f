"""The values of a step at all times, and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_graph import Port, StagedStep, View
from flexsn_hop.formats import dense_strides
from flexsn_runtime._recent import Recent


@dataclass(frozen=True, slots=True)
class OverTime:
    """A step or its VJP, with its values at all times.

    Attributes:
        num_steps: T, at least 1.
        reads: the values before each step.
        writes: the values that each step writes.
        lifted: lifted tensors, without gradients.
        matrices: matrices of the products, by number.
        backwards: True if the loop runs from the last step to the first.
        lasting: values of which all steps are read after the loop.
        from_zero: True if all carried values are zero before the first step.
        arriving: for a backward, pairs of tensors: the gradients after each step, `[T + 1, *step]`, and the gradients
            that are added to them, `[T, *step]`.
    """

    staged: StagedStep
    num_steps: int
    reads: Mapping[Port, Rows]
    writes: Mapping[Port, Rows]
    lifted: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    backwards: bool
    lasting: frozenset[Port]
    from_zero: bool
    arriving: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(
        cls,
        staged: StagedStep,
        num_steps: int,
        reads: Mapping[Port, Rows],
        writes: Mapping[Port, Rows],
        lifted: Sequence[Tensor],
        lasting: frozenset[Port],
        *,
        backwards: bool = False,
        from_zero: bool = False,
        arriving: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> OverTime:
        """Computes the matrices from the lifted tensors. Returns them together with the other arguments."""
        detached = tuple(tensor.detach() for tensor in lifted)
        matrices = tuple(staged.matrices.forward(*detached)) if staged.num_matrices else ()
        return cls(staged, num_steps, reads, writes, detached, matrices, backwards, lasting, from_zero, tuple(arriving))

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.backwards else "forward"


def rows_of(
    rows: int,
    shape: tuple[int, ...],
    order: Sequence[int] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    zero: bool = False,
) -> Tensor:
    """Allocates memory for values of steps, `[rows, *shape]`, without holes.

    Args:
        order: order of a step's dimensions in memory; `None` for the usual order. The usual order also applies if the
            number of dimensions differs.
        zero: True to fill the memory with zeros.
    """
    if order is None or len(order) != len(shape):
        return (torch.zeros if zero else torch.empty)((rows, *shape), dtype=dtype, device=device)
    strides = (math.prod(shape), *dense_strides(shape, tuple(order)))
    memory = torch.empty_strided((rows, *shape), strides, dtype=dtype, device=device)
    return memory.zero_() if zero else memory


class Rows(NamedTuple):
    """A value at each step, either before the step or after it.

    Attributes:
        memory: `[rows, *shape]`.
        first: the row of step 0. Step `t` has row `first + t`, modulo the number of rows.
        num_steps: T.
    """

    memory: Tensor
    first: int
    num_steps: int

    @property
    def is_sequence(self) -> bool:
        """True if the rows of all steps follow one another in `memory`, without returning to the first row."""
        return self.memory.shape[0] >= self.first + self.num_steps

    def through(self, view: View, layouts: Recent[ViewLayout] | None = None) -> Rows:
        """Returns the rows of a view of this value.

        Args:
            layouts: dictionary that stores layouts for later calls; `None` to store no layout.
        """
        if not view.calls:
            return self
        memory = self.memory
        shape, strides = memory.shape[1:], memory.stride()[1:]
        key = (id(view), shape, strides)
        layout = None if layouts is None else layouts.get(key)
        if layout is None:
            layout = ViewLayout.of(view, shape, strides)
            if layouts is not None:
                layouts[key] = layout
        if layout.strides is None:  # strides cannot express the view in this memory format
            return Rows(memory.contiguous(), self.first, self.num_steps).through(view, layouts)
        sizes, distances = (memory.shape[0], *layout.shape), (memory.stride(0), *layout.strides)
        offset = memory.storage_offset() + layout.offset
        return Rows(memory.as_strided(sizes, distances, offset), self.first, self.num_steps)

    @property
    def sequence(self) -> Tensor:
        """The value as one tensor, `[T, *shape]`."""
        assert self.is_sequence
        if self.memory.shape[0] == self.num_steps:
            return self.memory
        return self.memory[self.first : self.first + self.num_steps]

    def tensors(self) -> list[Tensor]:
        """Returns the tensor of each step."""
        rows = list(self.memory.unbind(0))
        return [rows[(self.first + t) % len(rows)] for t in range(self.num_steps)]

    def addresses(self) -> list[int]:
        """Returns the address of each step's tensor."""
        count, start = self.memory.shape[0], self.memory.data_ptr()
        distance = self.memory.stride(0) * self.memory.element_size()
        return [start + (self.first + t) % count * distance for t in range(self.num_steps)]


class ViewLayout(NamedTuple):
    """The layout of a view of a value, for one layout of the value's memory.

    Attributes:
        view: the view. It is kept alive, because its id is part of a key.
        shape, strides, offset: layout of the view. Without strides, the memory must be made contiguous first.
    """

    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int

    @classmethod
    def of(cls, view: View, shape: Sequence[int], strides: Sequence[int]) -> ViewLayout:
        """Returns the layout of the view of memory with this shape and these strides."""
        try:
            like = view(torch.empty_strided(tuple(shape), tuple(strides), device="meta"))
        except RuntimeError:
            return cls(view, (), None, 0)
        return cls(view, tuple(like.shape), like.stride(), int(like.storage_offset()))
