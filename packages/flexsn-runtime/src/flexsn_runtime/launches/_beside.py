"""Compiles kernels in another thread before they are launched.

Compilers take seconds, most of them outside of Python, so in another thread they delay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress


@contextmanager
def compiling(prepare: Callable[[], Callable[[], object]]) -> Iterator[None]:
    """Context that compiles in another thread while the body runs. The thread ends with the body.

    Errors are ignored here. They are raised when the kernel is launched, if it ever is.

    Args:
        prepare: called immediately. Returns the function that the other thread calls.
    """
    with ThreadPoolExecutor(1) as beside:
        with suppress(Exception):
            beside.submit(prepare())
        yield
