"""A plan without gradients, executed by Python until the compiled launcher is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flexsn_runtime._torch_private import untraced
from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.native import NativeCall, compiled_launcher, may_launch, told_forward

# Calls between polls for the compiled launcher, each of which reads the environment.
_ASKED_EVERY = 64


def executed(plan: Plan, there: Sequence[bool]) -> Callable[[Sequence[Tensor | None]], Sequence[Any]]:
    """The fastest execution of a plan.

    Args:
        there: which tensors of a call are; the others are states that begin with zeros.
    """
    return InferredScan(plan, there).run if may_launch(plan.device) else plan.run


class InferredScan:
    """A plan, and its calls so far; the arguments are those of `executed`."""

    def __init__(self, plan: Plan, there: Sequence[bool]) -> None:
        self._plan, self._there = plan, tuple(there)
        self._count = 0
        self._native: NativeCall | None = None
        self._is_told = False

    def run(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        """The results."""
        native = self._native
        if native is not None and not native.watched():
            return native.run(tensors)
        results = self._plan.run(tensors)
        self._count += 1
        if not self._is_told and self._count % _ASKED_EVERY == 1:
            self._hand_over()
        return results

    def _hand_over(self) -> None:
        module = compiled_launcher(self._plan.device, self._count)
        if module is None:
            return
        self._is_told = True
        with untraced():  # no mode has to see it
            launch = told_forward(self._plan)
            self._native = None if launch is None else NativeCall(module, launch, self._there)
