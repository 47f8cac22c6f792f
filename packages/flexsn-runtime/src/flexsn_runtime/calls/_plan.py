"""Calls with tensors of one layout as data: allocations, steps and results."""

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
"""The tensors of a call: `[*given, *allocated]`, followed by tensors that steps add."""


class PlanStep(Protocol):
    """A step of a plan. A step adds or replaces tensors in the memory of a call, or writes to tensors in it."""

    def __call__(self, memory: Memory) -> None: ...


class Allocation(NamedTuple):
    """A tensor that a call writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> Tensor:
        """Returns a tensor with this layout but without memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Launched(NamedTuple):
    """The launch of a kernel.

    Attributes:
        places: positions of the kernel's tensors in the memory of a call, in the order in which the kernel takes them.
        pick: function that selects these tensors.
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
    """Copies a tensor from a layout that a kernel cannot read to a layout that the kernel can read."""

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
    """Reduces the values that a kernel has written. The result is a gradient in the shape of its tensor.

    Attributes:
        place: position of the gradient in memory.
        like: position of the tensor to which the gradient belongs.
        sum: function that computes the gradient from these two tensors.
        plain: description of this function as data, if it only sums; otherwise `None`.
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
    """Gradients that a kernel has written to one tensor, one after the other. One sum reduces all of them.

    Attributes:
        given: number of a call's given tensors, which precede the allocated ones.
        results: positions of the gradients among the allocated tensors.
        written: layout of all gradients as the kernel writes them, `[gradients, ...]`.
        sum: function that reduces them to `[gradients, *shape]`.
    """

    given: int
    results: tuple[int, ...]
    written: Allocation
    sum: PlainSum

    def allocate(self, memory: Memory, device: torch.device) -> None:
        """Allocates one tensor for all gradients, and stores its parts at the positions of the gradients."""
        whole = torch.empty_strided(self.written.shape, self.written.strides, dtype=self.written.dtype, device=device)
        for i, part in zip(self.results, whole.unbind(), strict=True):
            memory[self.given + i] = part

    def __call__(self, memory: Memory) -> None:
        first = memory[self.given + self.results[0]]
        assert first is not None
        whole = first.as_strided(self.written.shape, self.written.strides)
        for i, part in zip(self.results, self.sum(whole).unbind(), strict=True):
            memory[self.given + i] = part.detach()  # a result must not be a view


class Moved(NamedTuple):
    """Replaces captured tensors that a kernel cannot read as they are. Appends the replacements to memory.

    Attributes:
        operands: the kernel's operands.
        places: positions of the captured tensors to replace.
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
    """Sums a tensor over all dimensions except the last.

    Attributes:
        place: position of the tensor.
        into: position of the result.
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
    """Returns the steps that prepare and perform a kernel's launch.

    Args:
        places: positions of the tensors that the kernel takes.
        size: number of given and allocated tensors in memory.
        between: steps to insert immediately before the launch.
    """
    moved = {place: size + i for i, place in enumerate(operands.moved)}
    first: list[PlanStep] = [Moved(operands, operands.moved)] if moved else []
    return [*first, *between, Launched.of(launch, [moved.get(place, place) for place in places])]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Calls of one layout as data. A call allocates tensors, executes the steps, and returns the allocated tensors.

    Attributes:
        device: device of the allocated tensors.
        allocations: for each result, its allocation; `None` if the result is absent.
        allocators: for each result, the function that allocates it; `None` if a step allocates it.
        steps: the steps after the allocations.
        together: the steps that allocate the results without an allocator.
        absent: positions of results that are computed or allocated, but not returned.
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
        """A plan that allocates with `allocator`, which has the interface of `Launch.allocator`."""
        together = tuple(step for step in steps if isinstance(step, SummedTogether))
        parts = {i for step in together for i in step.results}
        allocators = [
            None if one is None or i in parts else allocator(one.shape, one.strides, dtype=one.dtype, device=device)
            for i, one in enumerate(allocations)
        ]
        return cls(device, tuple(allocations), tuple(allocators), tuple(steps), absent, together)

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Executes the plan in Python. The execution can be recorded for the compiled launcher."""
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
        """Returns functions that only compile the plan's launches, for tensors of these dtypes and alignments."""
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
        """The plan without these results."""
        return replace(self, absent=self.absent | absent)

    def then(self, step: PlanStep, absent: frozenset[int]) -> Plan:
        """The plan with one more step, in which exactly these results are absent."""
        return replace(self, steps=(*self.steps, step), absent=absent)
