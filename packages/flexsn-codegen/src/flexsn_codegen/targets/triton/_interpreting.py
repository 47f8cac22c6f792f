"""Launches in Triton's interpreter, one at a time: it keeps the number of the running program in a global."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_one_launch = threading.RLock()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Around a launch.

    Without numpy's warnings, by which the interpreter computes: overflow is usual, and lanes outside of the data
    compute with zeros and are not stored.
    """
    with _one_launch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
