"""Launches a kernel: tensors and numbers in the order of its arguments."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from flexsn_codegen import Param
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._buckets import LaunchConfig
from flexsn_runtime._program import CompiledKernel

# Triton's interpreter keeps the number of the running program in a global.
_INTERPRETER = threading.Lock()

# No fma contraction and no flush to zero: bit for bit what eager computes.
_STRICT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


def launch(
    kernel: CompiledKernel,
    tensors: Mapping[Param, Tensor],
    sizes: Mapping[str, int],
    config: LaunchConfig,
    device: torch.device,
) -> None:
    """Runs `kernel` over `sizes["NCL"]` elements and `sizes["T"]` steps.

    Args:
        tensors: at least the kernel's tensor arguments.
        sizes: at least its integer arguments.
    """
    programs = -(-sizes["NCL"] // config.block)
    arguments = [*(tensors[p] for p in kernel.params), *(sizes[name] for name in kernel.sizes)]
    function = kernel.function[(programs,)]
    if triton_interpreted():
        with _INTERPRETER, warnings.catch_warnings():
            # Lanes beyond the end of the step compute with zeros, and are not stored.
            warnings.simplefilter("ignore", RuntimeWarning)
            function(*arguments, BLOCK=config.block)
        return
    with _on(device):
        function(*arguments, BLOCK=config.block, num_warps=config.num_warps, **_STRICT)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)
