"""Memory of large results on the CPU, which is reused for later results.

The system clears each page of new memory at the first access to the page. For results that are larger than the cache,
clearing takes as long as the scan itself. This module therefore provides the memory of large results, in huge pages.
When the last tensor in a block of memory is freed, the block is kept for later results. Until the block is used again,
the system may reclaim it (`MADV_FREE`) if memory runs short.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flexsn_runtime.launches._huge_pages import LARGE

_HUGE_PAGE = 2**21

# Maximum bytes of free memory that are kept.
_MOST = 2**31

# Free blocks. Code only appends and pops, since other threads and finalizers may change the deque at any moment.
_free: deque[mmap.mmap] = deque()

_IS_SUPPORTED = sys.platform == "linux" and all(hasattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_FREE"))


def allocator(
    shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Returns a function that allocates a tensor with this layout. The storage of a large tensor cannot be resized."""
    small = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    size = _count_bytes(shape, strides, dtype)
    if device.type == "cpu" and is_large(shape, strides, dtype):
        return partial(_allocate_large, -(-size // _HUGE_PAGE) * _HUGE_PAGE, small)
    return small


def is_large(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> bool:
    """True if this module provides the memory of a CPU result with this layout."""
    return _IS_SUPPORTED and _count_bytes(shape, strides, dtype) >= LARGE


def _count_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    return dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))


def _allocate_large(size: int, small: partial[Tensor]) -> Tensor:
    """Allocates the tensor that `small` allocates, but in `size` bytes of this module's memory.

    If this memory is not available, calls `small`.
    """
    storage = _allocate_storage(size)
    if storage is None:
        return small()
    shape, strides = small.args
    return torch.empty(0, **small.keywords).set_(storage, 0, tuple(shape), tuple(strides))


def _allocate_storage(size: int) -> torch.UntypedStorage | None:
    memory = _pop_free(size) or _map_memory(size)
    if memory is None:
        return None
    view = memoryview(memory)  # only the storage refers to the view, so both are freed together
    weakref.finalize(view, _give_back, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _pop_free(size: int) -> mmap.mmap | None:
    with contextlib.suppress(IndexError):  # raised if another thread has popped the last block
        for _ in range(len(_free)):
            memory = _free.popleft()
            if len(memory) == size:
                return memory
            _free.append(memory)
    return None


def _map_memory(size: int) -> mmap.mmap | None:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # too little memory, or no huge pages: torch then allocates, or raises an error
        _free.clear()
        return None
    return memory


def _give_back(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # after an error, the system reclaims the memory
        memory.madvise(mmap.MADV_FREE)
        _free.append(memory)
        while sum(map(len, _free.copy())) > _MOST:
            _free.popleft()
