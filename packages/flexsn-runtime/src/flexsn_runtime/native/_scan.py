"""Calls that the compiled launcher executes, without gradients or connected to autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType, ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from flexsn_runtime.calls._recorded import Recording
from flexsn_runtime.errors import StepGoneError
from flexsn_runtime.native._program import NativeProgram, can_be_native

Again = Callable[[Sequence[Tensor | None]], list[Tensor] | None]
"""Runs a call like an earlier one; returns `None` for tensors of other layouts, and under other settings."""


def again_of(module: ModuleType, tensors: Sequence[Tensor | None], *, scan: Any = None, program: Any = None) -> Again:
    """Returns a function that runs calls on tensors like these, under settings equal to the current ones.

    The function compares types, layouts, alignments and `requires_grad` of tensors. It also compares grad mode,
    autocast, inference mode, and active modes, transforms and tracers. It does not compare numbers in memory or other
    Python objects.

    Args:
        scan, program: object of the launcher that runs the calls. One of the two arguments is passed.
    """
    run: Again = module.Again(tensors, scan, program).run
    return run


class NativeCall:
    """A call without gradients.

    Args:
        module: the compiled launcher.
        recording: recording of a call for which `can_be_native` returns True.

    Attributes:
        watched: function that returns True if a hook watches launches that this call would bypass.
        run: function that computes the results from the tensors of a call.
    """

    def __init__(self, module: ModuleType, recording: Recording) -> None:
        program = NativeProgram(module, recording)
        self.watched = program.watched
        self.run: Callable[[Sequence[Tensor | None]], list[Tensor]] = program.program.run

    @classmethod
    def of(cls, module: ModuleType, recording: Recording | str) -> NativeCall | None:
        """Returns the native call of a recording; `None` if a part of the call needs Python."""
        return None if isinstance(recording, str) or not can_be_native(recording) else cls(module, recording)


class Owner(Protocol):
    """Continues in Python where the compiled launcher cannot continue."""

    def reads_hold(self) -> bool:
        """True if all values that backward formulas read are unchanged. Checked first in a backward with `reads`."""

    def gradients(self, tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> Sequence[Tensor | None]:
        """Computes the gradients of a backward with a layout that `follow` has not registered.

        Receives the arguments of the backward.
        """


class NativeScan:
    """A call with gradients, on tensors of one layout.

    Args:
        module: the compiled launcher.
        owner: function that returns the `Owner`. Its argument is True if the owner is needed. Otherwise, if the owner
            is freed, the function may return `None`; see `weakly`. An owner with links also has a method
            `refuse_hooks()`, which raises an error because a hook would miss the gradients that arrive through links.
        forward: recording of a call for which `can_be_native` returns True. Callers receive its first `first_kept`
            results, of which the results from `first_bits` on are bits. The backward receives the remaining results.
        fixed: positions of the results through which no gradient flows.
        saved: positions in `[*given, *results]` of the tensors that a backward receives, or `None` for an absent
            tensor. By default, these are all given tensors and the results that are saved for the backward.
        links: True if gradients of later results may come from a reader that hooks of the first result do not see.
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
        self._first_kept = first_kept
        self.watched = program.watched
        """True if a hook watches launches that this scan would bypass; checked before a forward, for both passes."""
        absent = [i for i, one in enumerate(forward.given) if not one]
        places = None
        if saved is not None:
            places = [None if place is None else place - sum(i < place for i in absent) for place in saved]
        there, of_call = list(forward.given), saved is None
        self._scan = module.Scan(
            owner, there, program.program, first_bits, first_kept, list(fixed), places, links, of_call
        )

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Executes a call on tensors of this layout. Returns its results, connected to autograd."""
        results: list[Tensor] = self._scan.run(tensors)
        return results

    def again(self, tensors: Sequence[Tensor | None]) -> Again:
        """Returns a function that runs calls on tensors of this layout, under the current settings; see `again_of`."""
        return again_of(self._module, tensors, scan=self._scan)

    def after(self, forward: Recording, tensors: Sequence[Tensor | None], computed: Mapping[int, int]) -> Again | None:
        """Like `again`, for calls in which `forward` computes some of the tensors. The backwards are the same.

        Args:
            forward: recording of a call on `tensors`. These contain another object in place of each tensor that the
                call computes, and additional tensors after the tensors of the scan.
            computed: maps the position of each computed tensor among the scan's tensors to its position in the results
                of `forward`.

        Returns:
            The function; `None` if a part of the call needs Python.
        """
        if not can_be_native(forward):
            return None
        program = NativeProgram(self._module, forward)
        there, end = [i for i, one in enumerate(forward.given) if one], self._first_kept
        count, num_results = len(there), len(forward.results) - len(computed)
        saved = [count + computed[i] if i in computed else n for n, i in enumerate(there) if i < len(self._there)]
        saved += [count + i for i in range(end, num_results)]
        return again_of(self._module, tensors, scan=self._scan.after(program.program, saved))

    def follow(
        self,
        given: Sequence[Tensor | None],
        needs_grad: Sequence[bool],
        recording: Recording | str | None,
        *,
        reads: bool,
    ) -> bool:
        """Registers a backward, which is launched from now on for arguments of its layout. Several can be registered.

        Args:
            given, needs_grad: the arguments of `Owner.gradients`.
            recording: recording of this call of `Owner.gradients`.
            reads: True if `reads_hold` has values to compare.

        Returns:
            False if a part of the backward needs Python.
        """
        if not isinstance(recording, Recording) or not can_be_native(recording):
            return False
        absent = {i for i, one in enumerate(self._there) if not one}
        slots = [i for i in range(len(given)) if self._saves or i not in absent]
        results = [number for i, number in enumerate(recording.results) if i not in absent]
        program = NativeProgram(self._module, recording, slots, results)
        needs = [need for i, need in enumerate(needs_grad) if i not in absent]
        self._scan.follow([given[i] for i in slots], needs, program.program, reads)
        return True


def weakly(owner: Owner, core: Any) -> Callable[[bool], Owner | None]:
    """Returns a function that returns the owner, as long as other references keep it alive.

    Args:
        core: the step function from which the owner's step was traced.
    """
    return partial(_present, weakref.ref(owner), _reference(_written_by_user(core)))


def _present(owner: Callable[[], Any], core: Callable[[], Any], needed: bool) -> Any:
    """Returns the owner of a scan, or `None` if the owner and the core are freed, so that no code can change the core.

    Args:
        owner, core: weak references.
        needed: True if the owner is needed for a computation.

    Raises:
        StepGoneError: the owner is freed, although it is needed for a computation, or to check the reads of a core that
            is still alive.
    """
    found = owner()
    if found is None and (needed or core() is not None):
        raise StepGoneError(
            "the step of this backward no longer exists: its neuron was deleted, or has run with many "
            "other settings or shapes since. Keep the neuron, and call backward() earlier."
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
    except TypeError:  # the object supports no weak references, so it is kept alive
        return lambda: thing
