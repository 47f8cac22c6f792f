"""Requests huge pages from the system for large results.

When a large result is written in small pages, the first access to each page takes most of the time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# A result is large if it has at least this number of bytes, which is one huge page. Torch's allocator provides the
# memory of smaller results. For a large result, that allocator may map new memory, depending on earlier allocations of
# the process. The page faults then take longer than a scan over the result.
LARGE = 2**21

_PAGE = mmap.PAGESIZE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def in_huge_pages(tensor: Tensor) -> None:
    """Requests huge pages for a new tensor, if the system provides them on request.

    The results do not depend on whether the system grants the request.
    """
    if _madvise is None:
        return
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    _madvise(first, max(0, end - first), mmap.MADV_HUGEPAGE)
