"""The step that a thread is running: the places of its random numbers, and the number of draws so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

_Result = TypeVar("_Result")


class Places(NamedTuple):
    """Arguments from which the random numbers of one step are computed, int32 each.

    Attributes:
        first, second, third: three words for each element of the step, `[*step]` each.
        step: index of the time step. Broadcasts to the other three.
    """

    first: Tensor
    second: Tensor
    third: Tensor
    step: Tensor


class Elements(NamedTuple):
    """Tensors from which the words of a step's elements are computed, int32 each. They broadcast to the step's shape.

    Attributes:
        low, high: the two words of the key.
        row: for each element, the index of its row in the batch.
        column: for each element, its index in the row, `[1, *step[1:]]`.
    """

    low: Tensor
    high: Tensor
    row: Tensor
    column: Tensor


class Step:
    """One run of a core.

    Attributes:
        places: places of the random numbers; `None` if draws return means.
        draws: number of draws so far.
    """

    def __init__(self, places: Places | None) -> None:
        self.places = places
        self.draws = 0


class _Current(threading.local):
    """The step that this thread is running; `None` outside of steps."""

    step: Step | None = None


current = _Current()


def drawing(places: Places | None, run: Callable[[], _Result]) -> _Result:
    """Returns the result of `run`. Draws inside of `run` use `places`, or return means if `places` is `None`."""
    before, current.step = current.step, Step(places)
    try:
        return run()
    finally:
        current.step = before
