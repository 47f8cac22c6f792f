"""Compiles in another thread what will be launched later.

Compilers take seconds, most of them outside of Python: in another thread, they take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress


@contextmanager
def compiling(prepare: Callable[[], Callable[[], object]]) -> Iterator[None]:
    """While the body runs, compiles; the thread ends with it.

    What is refused or fails is tried again, and raised, where it is launched, if it ever is.

    Args:
        prepare: is called at once, and returns what is called in the other thread.
    """
    with ThreadPoolExecutor(1) as beside:
        with suppress(Exception):
            beside.submit(prepare())
        yield
