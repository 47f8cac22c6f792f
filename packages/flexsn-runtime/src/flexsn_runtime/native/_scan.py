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
"""Type of a function that runs a call like an earlier call. It returns `None` for other layouts or settings."""


def again_of(module: ModuleType, tensors: Sequence[Tensor | None], *, scan: Any = None, program: Any = None) -> Again:
    """Returns a function that runs calls on tensors of these layouts, under the current settings.

    The function compares types, layouts, alignments and `requires_grad` of tensors. It also compares grad mode,
    autocast, inference mode, and active modes, transforms and tracers. It compares neither values in memory nor
    other Python objects.

    Args:
        scan, program: the launcher's object that runs the calls. Exactly one of the two must be passed.
    """
    run: Again = module.Again(tensors, scan, program).run
    return run


class NativeCall:
    """A call without gradients, which the compiled launcher executes.

    Args:
        module: the compiled launcher.
        recording: recording of a call for which `can_be_native` returns True.

    Attributes:
        watched: function that returns True if a hook watches launches. The compiled launcher would not call the hook.
        run: function that computes the results from the tensors of a call.
    """

    def __init__(self, module: ModuleType, recording: Recording) -> None:
        program = NativeProgram(module, recording)
        self.watched = program.watched
        self.run: Callable[[Sequence[Tensor | None]], list[Tensor]] = program.program.run

    @classmethod
    def of(cls, module: ModuleType, recording: Recording | str) -> NativeCall | None:
        """Returns the native call for a recording; `None` if an operation of the call needs Python."""
        return None if isinstance(recording, str) or not can_be_native(recording) else cls(module, recording)


class Owner(Protocol):
    """Interface of an object that computes gradients in Python if the compiled launcher cannot compute them."""

    def reads_hold(self) -> bool:
        """True if all values that backward formulas read are unchanged.

        A backward that was registered with `reads` calls this method first.
        """

    def gradients(self, tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> Sequence[Tensor | None]:
        """Computes the gradients of a backward whose layout is not registered with `NativeScan.follow`.

        Args:
            tensors: the tensors that the backward receives, including the gradients of the results.
            needs_grad: for each tensor of the call, True if its gradient is needed.
        """


class NativeScan:
    """A call with gradients, on tensors of one layout, which the compiled launcher connects to autograd.

    Args:
        module: the compiled launcher.
        owner: function that returns the `Owner`. If its argument is False and the owner is freed, the function may
            return `None`; see `weakly`. With `links`, the owner also has a method `refuse_hooks()`, which raises an
            error because a hook would not receive the gradients that arrive through links.
        forward: recording of a call for which `can_be_native` returns True.
        first_bits, first_kept: callers receive the results before index `first_kept`. Among these results, those from
            index `first_bits` on are bits. The backward receives the results from index `first_kept` on.
        fixed: positions of the results through which no gradient flows.
        saved: positions in `[*arguments, *results]` of the tensors that a backward receives; `None` for an absent
            tensor. By default, a backward receives all arguments, and the results from index `first_kept` on.
        links: True if gradients may arrive through later results without passing the hooks of the first result.
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
        self._module, self._is_present, self._saves = module, forward.is_tensor, saved is not None
        self._first_kept = first_kept
        self.watched = program.watched
        """Function that returns True if a hook watches launches. The compiled launcher would not call the hook.

        Callers call this function before a forward. Its result also applies to the backward.
        """
        absent = [i for i, is_tensor in enumerate(forward.is_tensor) if not is_tensor]
        positions = None
        if saved is not None:
            positions = [
                None if position is None else position - sum(i < position for i in absent) for position in saved
            ]
        is_present, of_call = list(forward.is_tensor), saved is None
        self._scan = module.Scan(
            owner, is_present, program.program, first_bits, first_kept, list(fixed), positions, links, of_call
        )

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Executes a call on tensors of the scan's layout. Returns the results of the call, connected to autograd."""
        results: list[Tensor] = self._scan.run(tensors)
        return results

    def again(self, tensors: Sequence[Tensor | None]) -> Again:
        """Returns a function that runs calls with these layouts, under the current settings; see `again_of`."""
        return again_of(self._module, tensors, scan=self._scan)

    def after(self, forward: Recording, tensors: Sequence[Tensor | None], computed: Mapping[int, int]) -> Again | None:
        """Returns a function like that of `again`, for calls in which `forward` computes some of the scan's tensors.

        The backward of such a call is the backward of this scan.

        Args:
            forward: recording of a call on `tensors`.
            tensors: the tensors of the scan, followed by additional tensors. Another object replaces each tensor that
                `forward` computes.
            computed: maps the position of each computed tensor among the scan's tensors to its position in the results
                of `forward`.

        Returns:
            The function; `None` if an operation of the call needs Python.
        """
        if not can_be_native(forward):
            return None
        program = NativeProgram(self._module, forward)
        present, first_saved = [i for i, is_tensor in enumerate(forward.is_tensor) if is_tensor], self._first_kept
        count, num_results = len(present), len(forward.results) - len(computed)
        saved = [
            count + computed[i] if i in computed else n for n, i in enumerate(present) if i < len(self._is_present)
        ]
        saved += [count + i for i in range(first_saved, num_results)]
        return again_of(self._module, tensors, scan=self._scan.after(program.program, saved))

    def follow(
        self,
        tensors: Sequence[Tensor | None],
        needs_grad: Sequence[bool],
        recording: Recording | str | None,
        *,
        reads: bool,
    ) -> bool:
        """Registers a backward. The compiled launcher then runs it for equal `needs_grad` and equal layouts.

        Args:
            tensors, needs_grad: the arguments of `Owner.gradients`.
            recording: recording of this call of `Owner.gradients`.
            reads: True if backward formulas read values, so that `Owner.reads_hold` must be called first.

        Returns:
            True if the backward is registered; False if an operation of the backward needs Python.
        """
        if not isinstance(recording, Recording) or not can_be_native(recording):
            return False
        absent = {i for i, is_tensor in enumerate(self._is_present) if not is_tensor}
        slots = [i for i in range(len(tensors)) if self._saves or i not in absent]
        results = [number for i, number in enumerate(recording.results) if i not in absent]
        program = NativeProgram(self._module, recording, slots, results)
        needs = [is_needed for i, is_needed in enumerate(needs_grad) if i not in absent]
        self._scan.follow([tensors[i] for i in slots], needs, program.program, reads)
        return True


def weakly(owner: Owner, core: Any) -> Callable[[bool], Owner | None]:
    """Returns a function that returns the owner as long as other references keep the owner alive.

    Args:
        core: the step function from which the owner's step was traced.
    """
    return partial(_find_owner, weakref.ref(owner), _make_reference(_unwrap_core(core)))


def _find_owner(owner: Callable[[], Any], core: Callable[[], Any], needed: bool) -> Any:
    """Returns the owner of a scan; `None` if the owner is not needed, and the owner and the core are freed.

    If the core is freed, no code can change the values that the core reads.

    Args:
        owner, core: weak references.
        needed: True if the owner is needed for a computation.

    Raises:
        StepGoneError: the owner is freed, although it is needed for a computation, or to check the reads of a core that
            is still alive.
    """
    owner_object = owner()
    if owner_object is None and (needed or core() is not None):
        raise StepGoneError(
            "the step of this backward no longer exists: its neuron was deleted, or has run with many "
            "other settings or shapes since. Keep the neuron, and call backward() earlier."
        )
    return owner_object


def _unwrap_core(core: Any) -> Any:
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


def _make_reference(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:  # the object supports no weak references, so it is kept alive
        return lambda: target
