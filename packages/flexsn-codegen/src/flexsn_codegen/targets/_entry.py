"""Launches of compiled kernels by their addresses, and observers of launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel with all of its arguments except for the tensors.

    Attributes:
        address: a `CUfunction` on a GPU. On the CPU, a function that takes a pointer to the arguments, the last of
            which is the number of threads.
        numbers: the arguments after the tensors, each as the integer that contains its bits.
        programs, threads, shared: the launch parameters on a GPU.
        kept: an object that has to exist as long as the address is called.
        watched: returns True if there is a hook for launches that a launch by address would bypass.
        beside: number of rows of `programs` in a launch on a GPU.
        together: True if programs wait for each other, which requires `cuLaunchCooperativeKernel`.
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
    """The value of `watched` if launches cannot be observed."""
    return False


class _Watching(threading.local):
    by: Callable[[Callable[..., Any], Sequence[Any], Entry | None], None] | None = None


watching = _Watching()
"""The observer of this thread's launches of pointwise kernels and of handwritten kernels. It receives the launching
function, its arguments, starting with the tensors, and its `Entry`."""
