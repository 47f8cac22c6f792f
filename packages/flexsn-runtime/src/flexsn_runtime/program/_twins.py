"""Traces cores with equal code once. Instances, copies and programs share the traced step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from flexsn_graph import StepValue
from flexsn_runtime._recent import Recent
from flexsn_runtime.step._specialization import CoreSpecialization
from flexsn_runtime.step._tracing import Core

# Maximum number of traces of the same code that are compared with a new core. These traces differ in values that the
# core reads.
_MOST_TWINS = 4

_steps: Recent[list[weakref.ref[CoreSpecialization]]] = Recent()
_lock = threading.Lock()


class TwinsOf:
    """Steps that were traced for the code of a core.

    A step belongs to one core, and the program of this core keeps the step alive. This module holds weak references to
    steps.

    Args:
        core: step function.
        inputs, states: descriptions of the values for which the core is traced.
        kind: value that is equal for steps that are traced and compiled in the same way.
    """

    def __init__(self, core: Core, inputs: Sequence[StepValue], states: Sequence[StepValue], kind: Hashable) -> None:
        self._core, self._inputs, self._states = core, inputs, states
        # The key contains everything except the size of the first dimension.
        values = tuple((len(v.shape), v.shape[1:], v.dtype) for v in (*inputs, *states))
        self._key = _find_code(core), values, kind

    def step(self) -> CoreSpecialization | None:
        """Returns a step of this core that shares the trace of an earlier step; `None` if no earlier step matches."""
        with _lock:
            earlier = [reference() for reference in _steps.get(self._key, ())]
        for step in earlier:
            twin = None if step is None else step.of_twin(self._core, self._inputs, self._states)
            if twin is not None:
                return self.remember(twin)
        return None

    def remember(self, step: CoreSpecialization) -> CoreSpecialization:
        """Stores a step for later cores with the same code, and returns it."""
        with _lock:
            alive = [reference for reference in _steps.get(self._key, ()) if reference() is not None]
            _steps[self._key] = [weakref.ref(step), *alive[: _MOST_TWINS - 1]]
        return step


def _find_code(core: Any) -> Hashable:
    """Returns a value that is equal for cores that may run the same code."""
    if isinstance(core, partial):
        return "partial", _find_code(core.func), *map(_find_code, core.args)
    if isinstance(core, MethodType):
        return _find_code(core.__func__), type(core.__self__)
    if isinstance(core, FunctionType):
        return core.__code__
    cls: type = type(core)
    return cls
