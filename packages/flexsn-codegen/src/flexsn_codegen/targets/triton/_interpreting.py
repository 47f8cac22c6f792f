"""Launches in Triton's interpreter. They run one at a time, because the index of the program is a global variable."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_one_launch = threading.RLock()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """A context for one launch.

    The interpreter computes with numpy. The context hides numpy's warnings, because overflow is common, and because
    lanes outside of the data compute with zeros. The results of these lanes are not stored.
    """
    with _one_launch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
