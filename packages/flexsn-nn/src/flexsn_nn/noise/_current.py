"""The step that a thread is running: the places of its random numbers, and the number of its draws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

_Result = TypeVar("_Result")


class Places(NamedTuple):
    """Arguments of the random numbers of one step, int32 each.

    Attributes:
        first, second, third: words for each element of the step, `[*step]`.
        step: index of the time step, which broadcasts to the step.
    """

    first: Tensor
    second: Tensor
    third: Tensor
    step: Tensor


class Elements(NamedTuple):
    """Numbers from which the words of a step's elements are computed, int32 each. All numbers broadcast to the step.

    Attributes:
        low, high: two words of the key.
        row: index in the batch.
        column: index of each element in its row, `[1, *step[1:]]`.
    """

    low: Tensor
    high: Tensor
    row: Tensor
    column: Tensor


class Step:
    """One run of a core.

    Attributes:
        places: places of its numbers; `None` if draws return means.
        draws: number of draws so far.
    """

    def __init__(self, places: Places | None) -> None:
        self.places = places
        self.draws = 0


class _Current(threading.local):
    """The step that this thread is running."""

    step: Step | None = None


current = _Current()


def drawing(places: Places | None, run: Callable[[], _Result]) -> _Result:
    """Returns the result of `run`. Draws inside of `run` use these places."""
    before, current.step = current.step, Step(places)
    try:
        return run()
    finally:
        current.step = before
