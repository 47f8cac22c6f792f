"""Launches in Triton's interpreter, one at a time, because the number of the running program is a global variable."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_one_launch = threading.RLock()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """The context of a launch.

    The context hides the warnings of numpy, with which the interpreter computes. Overflow is common, and lanes outside
    of the data compute with zeros whose results are not stored.
    """
    with _one_launch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
