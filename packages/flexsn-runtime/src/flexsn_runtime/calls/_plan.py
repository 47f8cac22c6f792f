"""A call of one kind as data: what is allocated, the steps, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsn_runtime.calls._recorded import current
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.launches._sum import PlainSum
from flexsn_runtime.operands._operands import Operands, picker

Memory = list[Tensor | None]
"""The tensors of a call: `[*given, *allocated]`, and behind them what steps add."""


class PlanStep(Protocol):
    """Changes the memory of a call, or what is in it."""

    def __call__(self, memory: Memory) -> None: ...


class Allocation(NamedTuple):
    """A tensor that a call writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> Tensor:
        """A tensor of this layout, without memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Launched(NamedTuple):
    """The launch of a kernel.

    Attributes:
        places: where the tensors that it takes are in memory, in its order.
        pick: picks them.
    """

    launch: Launch
    places: tuple[int, ...]
    pick: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]

    @classmethod
    def of(cls, launch: Launch, places: Sequence[int]) -> Launched:
        return cls(launch, tuple(places), picker(places))

    def __call__(self, memory: Memory) -> None:
        self.launch(self.pick(memory))


class Copied(NamedTuple):
    """A copy of a tensor in a layout that a kernel can read, instead of one that it cannot."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, memory: Memory) -> None:
        tensor = memory[self.place]
        assert tensor is not None
        copy = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=tensor.device)
        memory[self.place] = copy.copy_(tensor)


class Summed(NamedTuple):
    """A gradient of the shape of its tensor, of what a kernel has written.

    Attributes:
        place, like: where the gradient and its tensor are.
        sum: of the two.
        plain: the same as data, where it is nothing else than a sum.
    """

    place: int
    like: int
    sum: Callable[[Tensor, Tensor], Tensor]
    plain: PlainSum | None = None

    def __call__(self, memory: Memory) -> None:
        written, like = memory[self.place], memory[self.like]
        assert written is not None
        assert like is not None
        memory[self.place] = self.sum(written, like)


class SummedTogether(NamedTuple):
    """Gradients that a kernel has written to one memory, one after the other, by one sum for all.

    Attributes:
        given: how many tensors a call has; what it allocates comes after them.
        results: the gradients, by their number among what is allocated.
        written: the whole of what the kernel writes, `[gradients, ...]`.
        sum: of it, to `[gradients, *shape]`.
    """

    given: int
    results: tuple[int, ...]
    written: Allocation
    sum: PlainSum

    def allocate(self, memory: Memory, device: torch.device) -> None:
        """Puts the parts of a new tensor in their places."""
        whole = torch.empty_strided(self.written.shape, self.written.strides, dtype=self.written.dtype, device=device)
        for i, part in zip(self.results, whole.unbind(), strict=True):
            memory[self.given + i] = part

    def __call__(self, memory: Memory) -> None:
        first = memory[self.given + self.results[0]]
        assert first is not None
        whole = first.as_strided(self.written.shape, self.written.strides)
        for i, part in zip(self.results, self.sum(whole).unbind(), strict=True):
            memory[self.given + i] = part.detach()  # no view: it is a result


class Moved(NamedTuple):
    """Replacements of captured tensors that a kernel cannot read as they are, after all else in memory.

    Attributes:
        operands: of the kernel.
        places: where these tensors are.
    """

    operands: Operands
    places: tuple[int, ...]

    def __call__(self, memory: Memory) -> None:
        tensors = memory[: len(self.operands.params)]
        self.operands.move(tensors)
        memory.extend([tensors[place] for place in self.places])


class Unbound(NamedTuple):
    """Appends the slices of a tensor to memory."""

    place: int

    def __call__(self, memory: Memory) -> None:
        tensor = memory[self.place]
        assert tensor is not None
        memory.extend(tensor.unbind())


class RowsSummed(NamedTuple):
    """Sums a tensor over all dimensions but the last one.

    Attributes:
        place: of the tensor.
        into: of the result.
    """

    place: int
    into: int

    def __call__(self, memory: Memory) -> None:
        tensor = memory[self.place]
        assert tensor is not None
        memory[self.into] = tensor.reshape(-1, tensor.shape[-1]).sum(0)


def launching(
    operands: Operands, launch: Launch, places: Sequence[int], size: int, between: Sequence[PlanStep] = ()
) -> list[PlanStep]:
    """The steps up to a kernel's launch.

    Args:
        places: where the tensors that it takes are.
        size: of the memory: what is given and what is allocated.
        between: what is done right before the launch.
    """
    moved = {place: size + i for i, place in enumerate(operands.moved)}
    first: list[PlanStep] = [Moved(operands, operands.moved)] if moved else []
    return [*first, *between, Launched.of(launch, [moved.get(place, place) for place in places])]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Calls of one layout, as data: they allocate, take the steps, and return what was allocated.

    Attributes:
        device: of what is allocated.
        allocations: of the results; `None`: there is none in this place.
        allocators: of each allocation, what makes it.
        steps: what is done then.
        together: those of the steps that allocate, too: results without an allocator.
        absent: results that are not returned, though they are computed or allocated.
    """

    device: torch.device
    allocations: tuple[Allocation | None, ...]
    allocators: tuple[Callable[[], Tensor] | None, ...]
    steps: tuple[PlanStep, ...]
    absent: frozenset[int] = frozenset()
    together: tuple[SummedTogether, ...] = ()

    @classmethod
    def of(
        cls,
        device: torch.device,
        allocations: Sequence[Allocation | None],
        steps: Sequence[PlanStep],
        allocator: Callable[..., Callable[[], Tensor]],
        absent: frozenset[int] = frozenset(),
    ) -> Plan:
        """A plan that allocates with `allocator`, as `Launch.allocator`."""
        together = tuple(step for step in steps if isinstance(step, SummedTogether))
        parts = {i for step in together for i in step.results}
        allocators = [
            None if one is None or i in parts else allocator(one.shape, one.strides, dtype=one.dtype, device=device)
            for i, one in enumerate(allocations)
        ]
        return cls(device, tuple(allocations), tuple(allocators), tuple(steps), absent, together)

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Executes it in Python. What it does can be recorded, as for the compiled launcher."""
        memory = [*given]
        for allocate in self.allocators:
            memory.append(None if allocate is None else allocate())
        for one in self.together:
            one.allocate(memory, self.device)
        recorder = current.recorder
        for step in self.steps:
            if step.__class__ is Launched:
                launch, tensors = step.launch, step.pick(memory)
                if recorder is None:
                    launch(tensors)
                else:
                    recorder.note(launch, (tensors,), {})
            else:
                step(memory)
        first = len(given)
        for i in self.absent:
            memory[first + i] = None
        return memory[first : first + len(self.allocators)]

    def compilations(self, given: Sequence[Tensor | None]) -> list[Callable[[], object]]:
        """Functions that compile what it launches, for tensors like these in dtype and alignment, and run nothing."""
        memory = [*given]
        for one in self.allocations:
            like = None if one is None else torch.empty((), dtype=one.dtype, device=self.device).expand(one.shape)
            memory.append(like)
        found: list[Callable[[], object]] = []
        for step in self.steps:
            if isinstance(step, Launched):
                found.append(partial(step.launch.compile, step.pick(memory)))
            elif not found or isinstance(step, Unbound):
                step(memory)
        return found

    @property
    def is_compiled(self) -> bool:
        """True if nothing is left to compile."""
        return all(step.launch.is_compiled for step in self.steps if isinstance(step, Launched))

    def without(self, absent: frozenset[int]) -> Plan:
        """The plan without these among the results that a call returns."""
        return replace(self, absent=self.absent | absent)

    def then(self, step: PlanStep, absent: frozenset[int]) -> Plan:
        """The plan with one more step, which then returns all but these."""
        return replace(self, steps=(*self.steps, step), absent=absent)
