"""Calls that the compiled launcher makes: without gradients, and joined to autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType, ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from flexsn_runtime.calls._recorded import Recording
from flexsn_runtime.errors import StepGoneError
from flexsn_runtime.native._program import NativeProgram, can_be_native


class NativeCall:
    """A call without gradients.

    Args:
        module: the compiled launcher.
        recording: of a call that `can_be_native`.

    Attributes:
        watched: True if a hook watches launches that this call would bypass.
        run: of the tensors of a call, the results.
    """

    def __init__(self, module: ModuleType, recording: Recording) -> None:
        program = NativeProgram(module, recording)
        self.watched = program.watched
        self.run: Callable[[Sequence[Tensor | None]], list[Tensor]] = program.program.run

    @classmethod
    def of(cls, module: ModuleType, recording: Recording | str) -> NativeCall | None:
        """`None`: the call does what only Python does."""
        return None if isinstance(recording, str) or not can_be_native(recording) else cls(module, recording)


class Owner(Protocol):
    """Goes on in Python where the compiled launcher cannot."""

    def reads_hold(self) -> bool:
        """True if what backward formulas read is unchanged. A backward that `reads` begins with it."""

    def gradients(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of a backward that is like none of those that `follow` registered, with its arguments."""


class NativeScan:
    """A call with gradients, on tensors of one layout.

    Args:
        module: the compiled launcher.
        owner: gives the `Owner`, or, if it is freed and not needed (`False`), `None`: see `weakly`. An owner with links
            has `refuse_hooks()`, too, which raises: a hook would miss gradients that come by them.
        forward: of a call that `can_be_native`. It writes `first_kept` results, the last ones from `first_bits` on
            bits, and then what is for the backward.
        fixed: the results that no gradient flows through.
        saved: places in `[*given, *results]` of what a backward gets, instead of all that is given and what is for the
            backward; `None` among them: nothing.
        links: gradients of results but the first may come from a reader that hooks of the first do not see.
    """

    def __init__(
        self,
        module: ModuleType,
        owner: Callable[[bool], Owner | None],
        forward: Recording,
        *,
        first_bits: int,
        first_kept: int,
        fixed: Sequence[int],
        saved: Sequence[int | None] | None = None,
        links: bool = False,
    ) -> None:
        program = NativeProgram(module, forward)
        self._module, self._there, self._saves = module, forward.given, saved is not None
        self.watched = program.watched
        """True if a hook watches launches that this scan would bypass; checked before a forward, for both passes."""
        absent = [i for i, one in enumerate(forward.given) if not one]
        places = None
        if saved is not None:
            places = [None if place is None else place - sum(i < place for i in absent) for place in saved]
        self._scan = module.Scan(
            owner, list(forward.given), program.program, first_bits, first_kept, list(fixed), places, links
        )

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The results of a call on tensors of that layout, joined to autograd."""
        results: list[Tensor] = self._scan.run(tensors)
        return results

    def expect(self, tensors: Sequence[Tensor | None], *, grad: bool) -> None:
        """From now on, `run_alike` makes calls on tensors like these.

        Args:
            grad: such calls are made in grad mode.
        """
        self._scan.expect(tensors, grad)

    def run_alike(self, tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
        """As `run`; `None`: the tensors are of another layout, or launches are to be watched."""
        if self.watched():
            return None
        results: list[Tensor] | None = self._scan.run_alike(tensors)
        return results

    def follow(
        self, given: Sequence[Tensor | None], needed: Sequence[bool], recording: Recording | str | None, *, reads: bool
    ) -> bool:
        """Registers a backward, launched from now on for arguments of its layout; several are known at a time.

        Args:
            given, needed: the arguments of `Owner.gradients`.
            recording: of what that does.
            reads: `reads_hold` has something to compare.

        Returns:
            False: it does what only Python does.
        """
        if not isinstance(recording, Recording) or not can_be_native(recording):
            return False
        absent = {i for i, one in enumerate(self._there) if not one}
        slots = [i for i in range(len(given)) if self._saves or i not in absent]
        results = [number for i, number in enumerate(recording.results) if i not in absent]
        program = NativeProgram(self._module, recording, slots, results)
        needs = [need for i, need in enumerate(needed) if i not in absent]
        self._scan.follow([given[i] for i in slots], needs, program.program, reads)
        return True


def weakly(owner: Owner, core: Any) -> Callable[[bool], Owner | None]:
    """Gives the owner as long as others have it.

    Args:
        core: the step function that the owner's step was traced from.
    """
    return partial(_present, weakref.ref(owner), _reference(_written_by_user(core)))


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
