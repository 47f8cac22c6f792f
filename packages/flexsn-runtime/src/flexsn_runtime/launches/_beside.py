"""Compiles in other threads what will be launched later.

Compilers take seconds, most of them outside of Python: in other threads, they take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

_MOST_THREADS = 8


@contextmanager
def compiling(prepare: Callable[[], Sequence[Callable[[], object]]]) -> Iterator[None]:
    """While the body runs, compiles; the threads end with it.

    Errors are ignored here. They are raised when the kernel is launched, if it ever is.

    Args:
        prepare: is called at once, and returns what is called in other threads.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as beside:
        with suppress(Exception):
            for one in prepare():
                beside.submit(one)
        yield
