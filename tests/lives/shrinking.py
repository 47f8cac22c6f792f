"""Search for a shorter program that still has a difference, with a limited number of attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lives.networks import Plan
from lives.twins import DifferenceError, Program, live

_MAX_ATTEMPTS = 200


def find_shortest(error: DifferenceError) -> DifferenceError:
    """Leaves out acts and layers, and returns the error of the shortest program that still has a difference.

    The difference may be another one than in `error`, because any difference is a fault. The search ends after
    `_MAX_ATTEMPTS` programs.
    """
    attempts = 0
    improved = True
    while improved:
        improved = False
        for plan, program in _list_shorter(error.plan, error.program):
            attempts += 1
            if attempts > _MAX_ATTEMPTS:
                return error
            try:
                live(plan, program)
            except DifferenceError as other:
                error, improved = other, True
                break
    return error


def _list_shorter(plan: Plan, program: Program) -> Iterator[tuple[Plan, Program]]:
    """Yields shorter programs. The first ones lack some of the acts: half of them, then a quarter, and so on. The last
    ones have fewer or simpler layers.
    """
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
