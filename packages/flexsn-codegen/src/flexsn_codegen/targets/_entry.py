"""Launches of compiled kernels by their addresses, and observers of launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel with all of its arguments but the tensors.

    Attributes:
        address: on a GPU a `CUfunction`; on the CPU a function of a pointer to the arguments, of which the last one is
            the number of threads.
        numbers: the arguments behind the tensors, each as the integer that has its bits.
        programs, threads, shared: the launch on a GPU.
        kept: what has to be there as long as the address is called.
        watched: true if something watches launches that a launch by address would pass by.
        beside: number of rows of `programs` in a launch on a GPU.
        together: programs wait for each other: `cuLaunchCooperativeKernel`.
    """

    address: int
    numbers: tuple[int, ...]
    programs: int
    threads: int
    shared: int
    kept: object
    watched: Callable[[], bool]
    beside: int = 1
    together: bool = False


def unwatched() -> bool:
    """Stands for `watched` where no launch can be watched."""
    return False


class _Watching(threading.local):
    by: Callable[[Callable[..., Any], Sequence[Any], Entry | None], None] | None = None


watching = _Watching()
"""The observer of this thread's launches of pointwise kernels and of kernels written by hand: it receives the launching
function, its arguments, tensors first, and its `Entry`."""
