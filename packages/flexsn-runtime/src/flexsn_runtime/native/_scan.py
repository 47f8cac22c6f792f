"""A scan that the compiled launcher runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsn_runtime.calls._plan import Copied, Launched, Plan, Summed, SummedTogether
from flexsn_runtime.errors import StepGoneError
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.launches._sum import PlainSum


class LastLaunch(NamedTuple):
    """A launch after those of a backward.

    Attributes:
        launch: writes one tensor. Its places are in `[*given, *gradients, *constants, written]`.
        constants: tensors that it reads in each call.
    """

    launch: ByAddress
    constants: tuple[Tensor, ...]


class NativeCall:
    """A call of a plan without gradients, launched by the compiled launcher.

    Args:
        module: the compiled launcher.
        launch: the plan's only step.
        there: which tensors of a call are present; the others are states that begin with zeros.
    """

    def __init__(self, module: ModuleType, launch: ByAddress, there: Sequence[bool]) -> None:
        self.watched: Callable[[], bool] = launch.entry.watched
        """True if a hook watches launches that this launch would bypass."""
        launch = launch.without([i for i, one in enumerate(there) if not one], len(there))
        self.run: Callable[[Sequence[Tensor | None]], list[Tensor]] = module.Plan(
            list(launch.written), [_kernel(module, launch)]
        ).run


class NativeScan:
    """A scan with gradients, as `kernels._trained.TrainedScan` has it prepared.

    Args:
        module: the compiled launcher.
        owner: has `reads_hold()`, which a backward calls first, and `gradients(tensors, needed)`, called by a
            backward that is like none of those that `follow` registered, with arguments as `follow` takes them. It is
            not kept alive.
        core: the step function that the owner's step was traced from.
        there: which tensors of a call are present; the others are states that begin with zeros.
        launch: of the forward. It writes `first_kept` results, the last ones from `first_bits` on bits, and then what
            is for the backward.
        fixed: the results that no gradient flows through.
    """

    def __init__(
        self,
        module: ModuleType,
        owner: Any,
        core: Any,
        there: Sequence[bool],
        launch: ByAddress,
        *,
        first_bits: int,
        first_kept: int,
        fixed: Sequence[int],
    ) -> None:
        self._module = module
        self._absent = [i for i, one in enumerate(there) if not one]
        self.watched: Callable[[], bool] = launch.entry.watched
        """True if a hook watches launches that this scan would bypass; checked before a forward, for both passes."""
        launch = launch.without(self._absent, len(there))
        self._scan = module.Scan(
            partial(_present, weakref.ref(owner), _reference(_written_by_user(core))),
            list(there),
            module.Plan(list(launch.written), [_kernel(module, launch)]),
            first_bits,
            first_kept,
            list(fixed),
            None,
            False,
        )

    @classmethod
    def of(
        cls,
        module: ModuleType,
        owner: Any,
        core: Any,
        there: Sequence[bool],
        plan: Plan,
        *,
        first_bits: int,
        first_kept: int,
        fixed: Sequence[int],
    ) -> NativeScan | None:
        """The scan whose forward is a plan; `None`: that does more than to allocate and launch."""
        launch = told_forward(plan)
        if launch is None:
            return None
        return cls(module, owner, core, there, launch, first_bits=first_bits, first_kept=first_kept, fixed=fixed)

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The results of a call, joined to autograd.

        Args:
            tensors: `[*inputs, *states, *lifted]`, of the layout that was prepared.
        """
        results: list[Tensor] = self._scan.run(tensors)
        return results

    def follow(
        self,
        given: Sequence[Tensor | None],
        needed: Sequence[bool],
        plan: Plan,
        last: LastLaunch | None = None,
        *,
        asks: bool,
    ) -> bool:
        """Registers a backward, launched from now on for arguments of its layout; several are known at a time.

        Args:
            given: what `TrainedScan.gradients` takes.
            needed: as for `TrainedScan.gradients`.
            plan: writes a gradient for each tensor that is needed, and maybe for others, for `last`.
            last: makes another gradient of that of the first tensor.
            asks: whether `reads_hold` has anything to look at.

        Returns:
            False: the plan does what only Python does.
        """
        told = _told(plan, len(given))
        if told is None:
            return False
        launch, copies, sums, together = told
        absent = self._absent
        gone = [*absent, *(len(given) + i for i in absent)]
        launch = launch.without(gone, len(given))
        all_together = [
            self._module.Together(
                [i - sum(other < i for other in absent) for i in step.results],
                step.written.like(),
                _sum(self._module, step.sum),
            )
            for step in together
        ]
        self._scan.follow(
            [t for i, t in enumerate(given) if i not in absent],
            [need for i, need in enumerate(needed) if i not in absent],
            self._module.Plan(list(launch.written), [_kernel(self._module, launch)], all_together),
            [],
            [(place - sum(i < place for i in absent), like) for place, like in copies.items()],
            [_sum(self._module, sums.get(i)) for i in range(len(needed)) if i not in absent],
            None if last is None else _last(self._module, last, gone, len(given) + len(needed)),
            asks,
        )
        return True


class _ScanByAddress(NamedTuple):
    """A plan as the compiled launcher executes it.

    Attributes:
        launch: of its kernel, with what is allocated.
        copies: by place, what is like the copy that the kernel gets.
        sums: what becomes of some of the results then, by their number.
        together: those that are summed by one.
    """

    launch: ByAddress
    copies: dict[int, Tensor]
    sums: dict[int, PlainSum]
    together: list[SummedTogether]


def told_forward(plan: Plan) -> ByAddress | None:
    """The only step of a plan, a launch, with what is allocated; `None`: there are others, or it has no address."""
    told = _told(plan, 0) if len(plan.steps) == 1 else None
    return None if told is None else told.launch


def _told(plan: Plan, num_given: int) -> _ScanByAddress | None:
    """`None`: it has a step, or a result that is not returned, which only Python has."""
    launch, copies, sums = None, {}, {}
    together: list[SummedTogether] = []
    for step in plan.steps:
        if isinstance(step, Copied):
            copies[step.place] = torch.empty_strided(step.shape, step.strides, dtype=step.dtype, device="meta")
        elif isinstance(step, Launched):
            written = [None if one is None else one.like() for one in plan.allocations]
            launch = ByAddress.of(step.launch, step.places, written, plan.device)
        elif isinstance(step, Summed) and step.plain is not None:
            sums[step.place - num_given] = step.plain
        elif isinstance(step, SummedTogether):
            together.append(step)
        else:
            return None
    return None if launch is None or plan.absent else _ScanByAddress(launch, copies, sums, together)


def _present(owner: Callable[[], Any], core: Callable[[], Any], needed: bool) -> Any:
    """The owner of a graph's scan; `None`: it is freed, and so is the core, which no caller can change any more.

    Args:
        owner, core: references.
        needed: whether the owner has something to do.

    Raises:
        StepGoneError: the owner is freed, and is needed, or its reads would have to be checked.
    """
    found = owner()
    if found is None and (needed or core() is not None):
        raise StepGoneError(
            "the step that computed this was dropped before its backward: its neuron is gone, or has run with many "
            "other settings or shapes since. Keep the neuron, and call backward() before that."
        )
    return found


def _written_by_user(core: Any) -> Any:
    """Unwraps a core: returns the function, module or other object that the user wrote."""
    while True:
        if isinstance(core, MethodType):
            core = core.__self__
        elif not isinstance(core, nn.Module) and hasattr(core, "core"):
            core = core.core
        elif isinstance(core, partial):
            core = core.func
        else:
            return core


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # it takes no weak references, and is kept alive
        return lambda: thing


def _sum(module: ModuleType, plain: PlainSum | None) -> Any:
    return None if plain is None else module.Sum(list(plain.sum.steps), plain.shape, torch.empty(0, dtype=plain.dtype))


def _last(module: ModuleType, last: LastLaunch, gone: Sequence[int], before: int) -> Any:
    launch = last.launch.without(gone, before + len(last.constants))
    return module.Last(_kernel(module, launch), launch.written[0], list(last.constants))


def _kernel(module: ModuleType, launch: ByAddress) -> Any:
    entry = launch.entry
    return module.Kernel(
        entry.address,
        list(launch.places),
        list(entry.numbers),
        entry.programs,
        entry.threads,
        entry.shared,
        entry.kept,
        entry.beside,
        [],
    )
