"""Asks the system for huge pages: of a large result, most of the time goes to the first touch of each page."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# Bytes from which on a result is large: a huge page. What an allocator keeps of smaller ones depends on all that the
# process has allocated before: it may map each of them anew, whose page faults take longer than a scan over them.
LARGE = 2**21

_PAGE = mmap.PAGESIZE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def in_huge_pages(tensor: Tensor) -> None:
    """For a tensor that has just been allocated: where the system has huge pages for those who ask, it will be in some.

    A wish: nothing depends on its being granted.
    """
    if _madvise is None:
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    _madvise(first, max(0, end - first), mmap.MADV_HUGEPAGE)
