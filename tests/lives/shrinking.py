"""Shorter programs with the same difference, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from lives.networks import Plan
from lives.twins import DifferenceError, Program, live

_SECONDS = 60.0


def shortest(error: DifferenceError, seconds: float = _SECONDS) -> DifferenceError:
    """The difference of the shortest program that is found by leaving out acts and layers.

    Any difference of a shorter program counts: it is a fault as well.

    Args:
        seconds: after which the search ends.
    """
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for plan, program in _shorter(error.plan, error.program):
            if time.monotonic() > end:
                return error
            try:
                live(plan, program)
            except DifferenceError as other:
                error, found = other, True
                break
    return error


def _shorter(plan: Plan, program: Program) -> Iterator[tuple[Plan, Program]]:
    """Programs without some of the acts, many first, then with fewer or plainer layers."""
    size = len(program) // 2
    while size:
        for start in range(0, len(program), size):
            yield plan, program[:start] + program[start + size :]
        size //= 2
    for i, name in enumerate(plan.layers):
        if len(plan.layers) > 1:
            yield replace(plan, layers=plan.layers[:i] + plan.layers[i + 1 :]), program
        if name.startswith("+"):
            yield replace(plan, layers=(*plan.layers[:i], name[1:], *plan.layers[i + 1 :])), program
