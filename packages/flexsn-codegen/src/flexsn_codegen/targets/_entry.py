"""Launches of compiled kernels by their addresses, and observers of launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """The data of a launch of one kernel: the kernel's address, and its arguments except for the tensors.

    Attributes:
        address: address of a `CUfunction` on a GPU. On the CPU, address of a function that takes a pointer to the
            arguments. The last of these arguments is the number of threads.
        numbers: the arguments after the tensors, each as the integer that contains its bits. On the CPU, the number of
            threads is not included.
        programs, threads, shared: on a GPU, the first size of the grid, the number of threads of a program, and the
            number of bytes of shared memory of a program.
        owner: an object that has to exist as long as the kernel is launched by its address.
        watched: a function that returns True if a hook for launches is installed. A launch by address would bypass the
            hook.
        beside: the second size of the grid on a GPU.
        together: True if programs wait for each other, which requires `cuLaunchCooperativeKernel`.
    """

    address: int
    numbers: tuple[int, ...]
    programs: int
    threads: int
    shared: int
    owner: object
    watched: Callable[[], bool]
    beside: int = 1
    together: bool = False


def unwatched() -> bool:
    """The function for `Entry.watched` if hooks for launches do not exist. Returns False."""
    return False


class _Watching(threading.local):
    by: Callable[[Callable[..., Any], Sequence[Any], Entry | None], None] | None = None


watching = _Watching()
"""The observer (`watching.by`) of this thread's launches of pointwise kernels and of handwritten kernels.

The observer receives the object that launches the kernel, the arguments of this object, which begin with a list of the
tensors, and the launch's `Entry`, or `None` if it has none. Without an observer, `watching.by` is `None`."""
