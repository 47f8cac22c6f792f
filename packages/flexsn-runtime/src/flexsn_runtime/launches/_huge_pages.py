"""Requests huge pages from the system: of a large result, most of the time goes to the first touch of each page."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# Bytes from which on a result is large: a huge page. What an allocator keeps of smaller ones depends on all that the
# process has allocated before: it may map new memory for each, whose page faults take longer than a scan over it.
LARGE = 2**21

_PAGE = mmap.PAGESIZE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def in_huge_pages(tensor: Tensor) -> None:
    """Requests huge pages for a tensor that has just been allocated, where the system gives them on request.

    Nothing depends on the request being granted.
    """
    if _madvise is None:
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    _madvise(first, max(0, end - first), mmap.MADV_HUGEPAGE)
