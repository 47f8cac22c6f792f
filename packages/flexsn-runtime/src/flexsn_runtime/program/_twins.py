"""Steps of cores with the same code: traced once, and shared by instances, copies and programs."""

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

# Traces of one code that are compared with a new core: they differ by the numbers that they read.
_MOST_TWINS = 4

_steps: Recent[list[weakref.ref[CoreSpecialization]]] = Recent()
_lock = threading.Lock()


class TwinsOf:
    """Steps that were traced for the code of a core.

    A step belongs to one core, and is kept by its program: here is a weak reference.

    Args:
        core: the step function.
        inputs, states: what it is traced for.
        kind: equal for steps that are traced and compiled alike.
    """

    def __init__(self, core: Core, inputs: Sequence[StepValue], states: Sequence[StepValue], kind: Hashable) -> None:
        self._core, self._inputs, self._states = core, inputs, states
        # Everything but the size of the first dimension.
        values = tuple((len(v.shape), v.shape[1:], v.dtype) for v in (*inputs, *states))
        self._key = _code(core), values, kind

    def step(self) -> CoreSpecialization | None:
        """A step of this core that shares trace and kernels with an earlier one; `None`: there is none."""
        with _lock:
            earlier = [reference() for reference in _steps.get(self._key, ())]
        for step in earlier:
            twin = None if step is None else step.of_twin(self._core, self._inputs, self._states)
            if twin is not None:
                return self.remember(twin)
        return None

    def remember(self, step: CoreSpecialization) -> CoreSpecialization:
        """Offers a step to the cores that come after it; returns it."""
        with _lock:
            alive = [reference for reference in _steps.get(self._key, ()) if reference() is not None]
            _steps[self._key] = [weakref.ref(step), *alive[: _MOST_TWINS - 1]]
        return step


def _code(core: Any) -> Hashable:
    """Equal for cores that may run the same code."""
    if isinstance(core, partial):
        return "partial", _code(core.func), *map(_code, core.args)
    if isinstance(core, MethodType):
        return _code(core.__func__), type(core.__self__)
    if isinstance(core, FunctionType):
        return core.__code__
    cls: type = type(core)
    return cls
