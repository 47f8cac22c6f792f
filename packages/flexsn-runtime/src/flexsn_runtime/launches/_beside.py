"""Compiles kernels in other threads, before they are launched.

Compilers take seconds, which they spend mostly outside of Python. Other threads can therefore compile without delaying
this thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

_MOST_THREADS = 8


@contextmanager
def compiling(prepare: Callable[[], Sequence[Callable[[], object]]]) -> Iterator[None]:
    """Context in which other threads compile. It waits for them at its end.

    Errors are ignored here. They are raised again if the kernel is launched.

    Args:
        prepare: function that is called at once. It returns the functions that the other threads call.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as beside:
        with suppress(Exception):
            for one in prepare():
                beside.submit(one)
        yield
