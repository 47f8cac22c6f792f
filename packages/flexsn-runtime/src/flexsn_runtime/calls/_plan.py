"""Plans: calls with tensors of one layout, represented as data (allocations, steps and results)."""

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
"""The tensors of a call: the arguments of the call, then the allocated tensors, then tensors that steps append."""


class PlanStep(Protocol):
    """A step of a plan. It appends or replaces tensors in the memory of a call, or writes to tensors in this memory."""

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
        places: positions of the kernel's tensors in the memory of a call, in the order of the kernel's parameters.
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
    """Reduces the values that a kernel has written to a gradient with the shape of its tensor.

    Attributes:
        place: position of the gradient in memory.
        like: position of the tensor to which the gradient belongs.
        sum: function that computes the gradient from the written values and the tensor at `like`.
        plain: the function `sum` as data, if it only computes sums; otherwise `None`.
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
    """Reduces several gradients by one sum. A kernel has written them one after another into one tensor.

    Attributes:
        num_arguments: number of a call's arguments, which precede the allocated tensors in memory.
        results: positions of the gradients among the allocated tensors.
        written: layout of all gradients as the kernel writes them, `[gradients, ...]`.
        sum: function that reduces the written values to `[gradients, *shape]`.
    """

    num_arguments: int
    results: tuple[int, ...]
    written: Allocation
    sum: PlainSum

    def allocate(self, memory: Memory, device: torch.device) -> None:
        """Allocates one tensor for all gradients, and stores its slices at the positions of the gradients."""
        stacked_gradients = torch.empty_strided(
            self.written.shape, self.written.strides, dtype=self.written.dtype, device=device
        )
        for i, gradient in zip(self.results, stacked_gradients.unbind(), strict=True):
            memory[self.num_arguments + i] = gradient

    def __call__(self, memory: Memory) -> None:
        first = memory[self.num_arguments + self.results[0]]
        assert first is not None
        stacked = first.as_strided(self.written.shape, self.written.strides)
        for i, gradient in zip(self.results, self.sum(stacked).unbind(), strict=True):
            memory[self.num_arguments + i] = gradient.detach()  # a result must not be a view


class Moved(NamedTuple):
    """Computes replacements for captured tensors that a kernel cannot read, and appends them to memory.

    Attributes:
        operands: the kernel's operands.
        places: positions of the captured tensors that are replaced.
    """

    operands: Operands
    places: tuple[int, ...]

    def __call__(self, memory: Memory) -> None:
        tensors = memory[: len(self.operands.params)]
        self.operands.move(tensors)
        memory.extend([tensors[place] for place in self.places])


class Unbound(NamedTuple):
    """Appends the slices of a tensor along its first dimension to memory."""

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
    """Returns the steps that prepare a launch and launch the kernel.

    Args:
        places: positions of the tensors that the kernel takes.
        size: number of arguments and allocated tensors in memory.
        between: steps to insert immediately before the launch.
    """
    replacements = {place: size + i for i, place in enumerate(operands.moved)}
    moves: list[PlanStep] = [Moved(operands, operands.moved)] if replacements else []
    return [*moves, *between, Launched.of(launch, [replacements.get(place, place) for place in places])]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Calls with tensors of one layout, as data.

    A call allocates its results, executes the steps, and returns the results.

    Attributes:
        device: device of the results.
        allocations: for each result, its allocation; `None` if the result is absent.
        allocators: for each result, the function that allocates it; `None` if the result is absent or a step allocates
            it.
        steps: the steps after the allocations.
        together: the steps that allocate several results each. The entries of `allocators` for these results are
            `None`.
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
        """Returns a plan that allocates with `allocator`, a function with the interface of `Launch.allocator`."""
        joint_steps = tuple(step for step in steps if isinstance(step, SummedTogether))
        summed_together = {i for step in joint_steps for i in step.results}
        allocators = [
            None
            if allocation is None or i in summed_together
            else allocator(allocation.shape, allocation.strides, dtype=allocation.dtype, device=device)
            for i, allocation in enumerate(allocations)
        ]
        return cls(device, tuple(allocations), tuple(allocators), tuple(steps), absent, joint_steps)

    def run(self, arguments: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Executes the plan in Python. The execution can be recorded for the compiled launcher."""
        memory = [*arguments]
        for allocate in self.allocators:
            memory.append(None if allocate is None else allocate())
        for group in self.together:
            group.allocate(memory, self.device)
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
        first = len(arguments)
        for i in self.absent:
            memory[first + i] = None
        return memory[first : first + len(self.allocators)]

    def compilations(self, arguments: Sequence[Tensor | None]) -> list[Callable[[], object]]:
        """Returns functions that compile the plan's launches, for the dtypes and alignments of these arguments."""
        memory = [*arguments]
        for allocation in self.allocations:
            if allocation is None:
                memory.append(None)
            else:
                memory.append(torch.empty((), dtype=allocation.dtype, device=self.device).expand(allocation.shape))
        compilations: list[Callable[[], object]] = []
        for step in self.steps:
            if isinstance(step, Launched):
                compilations.append(partial(step.launch.compile, step.pick(memory)))
            elif not compilations or isinstance(step, Unbound):
                step(memory)
        return compilations

    @property
    def is_compiled(self) -> bool:
        """True if all kernels of the plan are compiled."""
        return all(step.launch.is_compiled for step in self.steps if isinstance(step, Launched))

    def without(self, absent: frozenset[int]) -> Plan:
        """Returns a plan that also returns `None` for the results in `absent`."""
        return replace(self, absent=self.absent | absent)

    def then(self, step: PlanStep, absent: frozenset[int]) -> Plan:
        """Returns a plan with one more step at the end. The plan returns `None` for exactly the results in `absent`."""
        return replace(self, steps=(*self.steps, step), absent=absent)
