"""A plan without gradients, executed by Python until the compiled launcher is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flexsn_runtime._torch_private import number_of_modes, untraced
from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.calls._recorded import current, recorded
from flexsn_runtime.native import NativeCall, compiled_launcher, may_launch

# Calls between polls for the compiled launcher, each of which reads the environment.
_ASKED_EVERY = 64


def executed(plan: Plan) -> Callable[[Sequence[Tensor | None]], Sequence[Any]]:
    """The fastest execution of a plan."""
    return InferredScan(plan).run if may_launch(plan.device) else plan.run


class InferredScan:
    """A plan, and its calls so far.

    Args:
        plan: without gradients.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._count = 0
        self._native: NativeCall | None = None

    def run(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        """The results."""
        native = self._native
        if native is not None:
            return native.run(tensors) if current.recorder is None and not native.watched() else self._plan.run(tensors)
        if number_of_modes():  # which would see what a recording does
            return self._plan.run(tensors)
        self._count += 1
        is_due = self._count % _ASKED_EVERY == 1
        module = compiled_launcher(self._plan.device, self._count) if is_due else None
        if module is None:
            return self._plan.run(tensors)
        results, recording = recorded(self._plan.run, tensors)
        with untraced():  # no mode has to see it
            self._native = NativeCall.of(module, recording)
        return results
