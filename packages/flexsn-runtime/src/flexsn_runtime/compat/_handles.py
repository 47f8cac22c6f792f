"""Integer handles of kernels. An operator takes a handle, because its schema does not allow kernels as arguments.

A bundle of kernels exists as long as it has an owner (a module) or a use (a saved autograd context). One lock guards
the counts of owners and uses. The release that reduces both counts to zero removes the bundle, and then closes its
kernels without holding the lock.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexsn_graph import FlexSNInfo
from flexsn_runtime.compat._kernels import ScanKernel
from flexsn_runtime.errors import UnknownHandleError


@dataclass(slots=True)
class FlexSNKernelHandle:
    """The kernels of one step function, by purpose, with counts of owners and uses."""

    inference_kernel: ScanKernel | None
    inference_info: FlexSNInfo | None
    inference_final_state_kernel: ScanKernel | None
    inference_final_state_info: FlexSNInfo | None
    forward_kernel: ScanKernel | None
    backward_kernel: ScanKernel | None
    training_info: FlexSNInfo | None
    owner_refs: int = 1
    active_refs: int = 0

    def close(self) -> None:
        """Closes each kernel once."""
        kernels = (
            self.inference_kernel,
            self.inference_final_state_kernel,
            self.forward_kernel,
            self.backward_kernel,
        )
        for kernel in {id(kernel): kernel for kernel in kernels if kernel is not None}.values():
            kernel.close()


_handles: dict[int, FlexSNKernelHandle] = {}
_handle_numbers = itertools.count(1)
# Reentrant, because a finalizer may run while this thread holds the lock.
_lock = threading.RLock()


def register_flexsn_kernel_handle(
    *,
    inference_kernel: ScanKernel | None,
    inference_info: FlexSNInfo | None,
    inference_final_state_kernel: ScanKernel | None,
    inference_final_state_info: FlexSNInfo | None,
    forward_kernel: ScanKernel | None,
    backward_kernel: ScanKernel | None,
    training_info: FlexSNInfo | None,
) -> int:
    """Registers a bundle with one owner, and returns its handle."""
    bundle = FlexSNKernelHandle(
        inference_kernel,
        inference_info,
        inference_final_state_kernel,
        inference_final_state_info,
        forward_kernel,
        backward_kernel,
        training_info,
    )
    with _lock:
        handle = next(_handle_numbers)
        _handles[handle] = bundle
    return handle


def get_flexsn_kernel_handle(handle: int | Tensor) -> FlexSNKernelHandle:
    """Returns the bundle of a handle. Raises `UnknownHandleError` if the handle does not exist."""
    number = _read_handle(handle)
    with _lock:
        bundle = _handles.get(number)
    if bundle is None:
        raise UnknownHandleError(
            f"there is no kernel handle {number}: it was never registered, or its module and every backward "
            "that used it were deleted."
        )
    return bundle


def flexsn_kernel_registry_info() -> dict[int, dict[str, int]]:
    """Returns the counts `owner_refs` and `active_refs` of each existing handle.

    Example:
        >>> from flexsn_runtime import flexsn_kernel_registry_info
        >>> sum(kernel["owner_refs"] for kernel in flexsn_kernel_registry_info().values()) >= 0
        True
    """
    with _lock:
        return {
            handle: {"owner_refs": bundle.owner_refs, "active_refs": bundle.active_refs}
            for handle, bundle in _handles.items()
        }


def retain_flexsn_kernel_handle(handle: int | Tensor) -> None:
    """Adds a use of a handle, which `release_active_flexsn_kernel_handle` removes."""
    with _lock:
        get_flexsn_kernel_handle(handle).active_refs += 1


def release_active_flexsn_kernel_handle(handle: int | Tensor) -> None:
    """Removes a use of a handle. Does nothing if the handle has no use."""
    _release(handle, "active_refs")


def retain_owner_flexsn_kernel_handle(handle: int | Tensor) -> None:
    """Adds an owner of a handle, which `release_flexsn_kernel_handle` removes."""
    with _lock:
        get_flexsn_kernel_handle(handle).owner_refs += 1


def release_flexsn_kernel_handle(handle: int | Tensor) -> None:
    """Removes an owner of a handle. Does nothing if the handle has no owner."""
    _release(handle, "owner_refs")


def attach_flexsn_handle_finalizer(owner: object, handle: int) -> weakref.finalize[Any, Any]:
    """Registers a finalizer: when the object `owner` is freed, one owner of `handle` is removed."""
    return weakref.finalize(owner, release_flexsn_kernel_handle, handle)


def _release(handle: int | Tensor, counter: str) -> None:
    number = _read_handle(handle)
    with _lock:
        bundle = _handles.get(number)
        if bundle is None or getattr(bundle, counter) == 0:
            return
        setattr(bundle, counter, getattr(bundle, counter) - 1)
        if bundle.owner_refs or bundle.active_refs:
            return
        del _handles[number]
    bundle.close()


def _read_handle(handle: int | Tensor) -> int:
    return int(handle.item()) if isinstance(handle, Tensor) else int(handle)
