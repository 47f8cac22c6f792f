"""A product with a backward, whose plans launch several kernels, run by the compiled launcher."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexsn_runtime.calls._plan import Launched, Plan, RowsSummed, Unbound
from flexsn_runtime.launches._entry import Entry


class ProductOwner(Protocol):
    """Goes on in Python where the compiled launcher cannot."""

    def gradients(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        """Returns gradients of the operands that are there, of what was saved and what arrives."""

    def refuse_hooks(self) -> None:
        """Raises: a hook would miss gradients that come by links."""


class NativeProduct:
    """Calls on tensors of one layout, with the backwards registered for them.

    Args:
        module: the compiled launcher.
        given: operands of such a call.
        forward: its plan over them.
        results: the number of its first results that gradients come to.
        returned: the number of its first results that a call returns.
        saved: places in memory of what a backward gets; `None`: nothing is there.
        grad: such calls are made in grad mode.
    """

    def __init__(
        self,
        module: ModuleType,
        owner: ProductOwner,
        given: Sequence[Tensor | None],
        forward: _PlanByAddress,
        *,
        results: int,
        returned: int,
        saved: Sequence[int | None],
        grad: bool,
    ) -> None:
        self._module, self._watched = module, forward.entries
        self._operands = len(given)
        self._there = [i for i, tensor in enumerate(given) if tensor is not None]
        self._scan = module.Scan(
            lambda _: owner,
            [True] * len(self._there),
            forward.plan(module),
            results,
            returned,
            [*range(results, returned)],
            [None if place is None else forward.place(place) for place in saved],
            results > 1,
        )
        self._scan.expect([given[i] for i in self._there], grad)

    @classmethod
    def of(
        cls,
        module: ModuleType,
        owner: ProductOwner,
        given: Sequence[Tensor | None],
        plan: Plan,
        *,
        results: int,
        returned: int,
        saved: Sequence[int | None],
        grad: bool,
    ) -> NativeProduct | None:
        """`None`: a kernel of the plan has no address, or none so far."""
        told = _PlanByAddress.of(plan, len(given), [i for i, tensor in enumerate(given) if tensor is None])
        if told is None:
            return None
        return cls(module, owner, given, told, results=results, returned=returned, saved=saved, grad=grad)

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The results of a call; `None`: its tensors are of another layout, or launches are to be watched."""
        if self._watched[0].watched():
            return None
        found: list[Tensor] | None = self._scan.run_alike([tensor for tensor in given if tensor is not None])
        return found

    def follow(self, tensors: Sequence[Tensor | None], needed: Sequence[bool], plan: Plan) -> bool:
        """Tells a backward, which is launched from now on wherever what comes has the layout of this.

        Args:
            tensors: what was saved, and gradients.
            needed: which gradients of the operands that are there.
            plan: writes the gradients of all operands first, those that are needed.

        Returns:
            False: a kernel of the plan has no address.
        """
        count = len(tensors)
        told = _PlanByAddress.of(plan, count, [count + i for i in range(self._operands) if i not in self._there])
        if told is None:
            return False
        taken: list[int | None] = [None] * len(needed)
        sums: list[Any] = [None] * len(needed)
        for result, place in told.sums.items():
            tensor = tensors[place]
            assert tensor is not None
            taken[result] = place
            steps = [(None, [*range(tensor.dim() - 1)])] if tensor.dim() > 1 else []
            sums[result] = self._module.Sum(steps, tensor.shape[-1:], torch.empty(0, dtype=tensor.dtype))
        self._scan.follow(tensors, needed, told.plan(self._module), taken, [], sums, None, False)
        return True


class _Launch(NamedTuple):
    """A launch by address.

    Attributes:
        places, offsets: of the tensors that it takes; bytes from their beginnings.
    """

    entry: Entry
    places: list[int]
    offsets: list[int]


class _PlanByAddress(NamedTuple):
    """A plan as the compiled launcher executes it.

    Attributes:
        written: tensors like those that are allocated; `None`: a place without one.
        sums: by the number of a result, the place of what it is the sum of.
        place: where in memory, without what is gone, something is.
    """

    written: list[Tensor | None]
    launches: list[_Launch]
    sums: dict[int, int]
    place: Callable[[int], int]

    @classmethod
    def of(cls, plan: Plan, given: int, gone: Collection[int]) -> _PlanByAddress | None:
        """`None`: it has a step that only Python has.

        Args:
            given: the number of tensors that are given.
            gone: places that a call lacks.
        """

        def where(place: int) -> int:
            return place - sum(other < place for other in gone)

        likes = [None if one is None else one.like() for one in plan.allocations]
        cut: dict[int, tuple[int, int]] = {}
        launches, sums = [], {}
        for step in plan.steps:
            if isinstance(step, Unbound):
                like = likes[step.place - given]
                assert like is not None
                first = given + len(likes) + len(cut)
                size = like[0].numel() * like.element_size()
                cut |= {first + i: (step.place, i * size) for i in range(len(like))}
            elif isinstance(step, RowsSummed):
                sums[where(step.into) - where(given)] = step.place
            elif isinstance(step, Launched) and (entry := step.launch.entry()) is not None:
                found = [cut.get(place, (place, 0)) for place in step.places]
                launches.append(_Launch(entry, [where(place) for place, _ in found], [bytes_ for _, bytes_ in found]))
            else:
                return None
        written = [like for i, like in enumerate(likes) if given + i not in gone]
        return cls(written, launches, sums, where)

    @property
    def entries(self) -> list[Entry]:
        return [launch.entry for launch in self.launches]

    def plan(self, module: ModuleType) -> Any:
        kernels = [
            module.Kernel(
                entry.address,
                places,
                list(entry.numbers),
                entry.programs,
                entry.threads,
                entry.shared,
                entry.kept,
                entry.beside,
                offsets,
            )
            for entry, places, offsets in self.launches
        ]
        return module.Plan(self.written, kernels)
