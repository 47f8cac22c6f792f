"""Requests huge pages from the system, since touching new pages takes most of the time of writing a large result."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# A result of at least this number of bytes, one huge page, is large. Smaller results are left to torch's allocator. The
# cache of this allocator depends on all earlier allocations of the process. The allocator may map new memory for each
# result, and the page faults then take longer than a scan over the result.
LARGE = 2**21

_PAGE = mmap.PAGESIZE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def in_huge_pages(tensor: Tensor) -> None:
    """Requests huge pages for a new tensor, if the system provides them on request.

    Nothing depends on the system granting the request.
    """
    if _madvise is None:
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    _madvise(first, max(0, end - first), mmap.MADV_HUGEPAGE)
