"""Launches in Triton's interpreter, one at a time: the number of the running program is in a global variable."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_one_launch = threading.RLock()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """The context of a launch.

    It hides warnings of numpy, with which the interpreter computes: overflow is usual, and lanes outside of the data
    compute with zeros and are not stored.
    """
    with _one_launch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
