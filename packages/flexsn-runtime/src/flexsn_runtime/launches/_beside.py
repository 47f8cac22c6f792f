"""Compiles kernels in other threads, before they are launched.

A compiler takes seconds, most of them outside of Python. Other threads can therefore compile without delaying the
calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

_MOST_THREADS = 8


@contextmanager
def compiling(prepare: Callable[[], Sequence[Callable[[], object]]]) -> Iterator[None]:
    """Returns a context in which other threads compile kernels. The context ends when these threads have finished.

    Errors of `prepare` and of the compilers are ignored. The launch of a kernel that could not be compiled raises the
    error.

    Args:
        prepare: function that is called immediately. It returns the functions that the other threads call.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as executor:
        with suppress(Exception):
            for compile_kernel in prepare():
                executor.submit(compile_kernel)
        yield
