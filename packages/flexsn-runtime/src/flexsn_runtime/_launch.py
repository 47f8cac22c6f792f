"""Launches a kernel: tensors and numbers in the order of its arguments."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._buckets import LaunchConfig
from flexsn_runtime._program import CompiledKernel

# Triton's interpreter keeps the number of the running program in a global.
_INTERPRETER = threading.Lock()

# No fma contraction and no flush to zero: bit for bit what eager computes.
_STRICT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
_HERE: AbstractContextManager[object] = nullcontext()


class Launch:
    """Runs a kernel over `sizes["NCL"]` elements and `sizes["T"]` steps, as often as it is called.

    Args:
        sizes: at least the kernel's integer arguments.
        device: of the tensors that it will be called with. Of these, those in the same place have to be aligned
            to 16 bytes in every call or in none: Triton compiles for it, and is asked once.
    """

    def __init__(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> None:
        self._function = kernel.function
        self._numbers = [sizes[name] for name in kernel.sizes]
        self._grid = (-(-sizes["NCL"] // config.block), 1, 1)
        self._config = config
        self._device = device
        self._compiled: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches; `tensors` are in the order of the kernel's parameters."""
        block = self._config.block
        if self._compiled is not None:
            with _on(self._device):
                self._compiled(*tensors, *self._numbers, block)
        elif triton_interpreted():
            with _INTERPRETER, warnings.catch_warnings():
                # Lanes beyond the end of the step compute with zeros, and are not stored.
                warnings.simplefilter("ignore", RuntimeWarning)
                self._function[self._grid](*tensors, *self._numbers, BLOCK=block)
        else:
            options = {"num_warps": self._config.num_warps, **_STRICT}
            with _on(self._device):
                compiled = self._function[self._grid](*tensors, *self._numbers, BLOCK=block, **options)
            # Without Triton's search for the binary that fits the arguments: half of a launch's time.
            self._compiled = None if compiled is None else compiled[self._grid]


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if _single_device() or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def _single_device() -> bool:
    return torch.cuda.device_count() == 1
