"""Compiles kernels in other threads, before they are launched.

Compilers take seconds, most of them outside of Python, so the compilation in other threads costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

_MOST_THREADS = 8


@contextmanager
def compiling(prepare: Callable[[], Sequence[Callable[[], object]]]) -> Iterator[None]:
    """Context in which other threads compile; they end with it.

    Errors are ignored here. They are raised when the kernel is launched, if it ever is.

    Args:
        prepare: a function that is called at once, and returns the functions that other threads call.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as beside:
        with suppress(Exception):
            for one in prepare():
                beside.submit(one)
        yield
