"""Launches pointwise kernels: in Triton on a GPU, in C++ or in Triton's interpreter on the CPU."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._numerics import compile_options
from flexsn_codegen.errors import DeviceError
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.cpp import CPP, CppKernel, why_no_compiler
from flexsn_codegen.targets.triton import TRITON

BLOCK = 1024
# The interpreter's time goes with the number of programs; numpy does the rest.
_MAX_INTERPRETED_BLOCK = 1 << 16
# In C++ a program is a loop over so many elements, short enough for what it keeps to stay in the nearest cache.
CPP_BLOCK = 4096


def interpreted() -> bool:
    """Whether Triton runs on CPU tensors, in its interpreter."""
    try:
        from flexsn_codegen.targets.triton import device
    except ImportError:
        # Without triton: the compilation says so.
        return os.environ.get("TRITON_INTERPRET", "0") != "0"
    return device.INTERPRETED


def target_on(device: torch.device, name: str) -> Target:
    """What kernels on a device are written in.

    Raises:
        DeviceError: nothing compiles for it; says what to install or to move. `name` is the function's.
    """
    if device.type == "cuda":
        return TRITON
    if device.type == "cpu":
        if interpreted():
            return TRITON
        why = why_no_compiler()
        if why is None:
            return CPP
        raise DeviceError(
            f"the arguments of {name} are on the CPU, where its kernel is compiled from C++, and {why} Or move them to "
            "a GPU, or set TRITON_INTERPRET=1 before triton is imported, to run slowly without a compiler."
        )
    raise DeviceError(
        f"the arguments of {name} are on {device}: kernels are compiled for CUDA and ROCm GPUs and for the CPU. Move "
        "them there."
    )


def target_of(device: torch.device) -> Target:
    """For what stands in for tensors, which may be on a device that is not there."""
    return CPP if device.type == "cpu" and not interpreted() else TRITON


def launch(
    target: Target,
    kernel: Any,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    numel: int,
    *,
    fast_math: bool,
) -> None:
    """Runs a kernel over `numel` elements.

    Args:
        kernel: from `target.compile`.
        tensors: in the order of the kernel's parameters.
        numbers: its integer arguments, the first of them `numel`.
    """
    if isinstance(kernel, CppKernel):
        run = kernel.compiled(tuple(t.dtype for t in tensors), CPP_BLOCK, fast_math=fast_math)
        run([*[t.data_ptr() for t in tensors], *numbers, torch.get_num_threads()])
        return
    if interpreted():
        block = min(1 << (numel - 1).bit_length(), _MAX_INTERPRETED_BLOCK)
        with _quiet():
            kernel[(-(-numel // block),)](*tensors, *numbers, BLOCK=block)
        return
    options = compile_options("hip" if torch.version.hip else "cuda", fast_math=fast_math)
    with torch.cuda.device(tensors[0].device):
        kernel[(-(-numel // BLOCK),)](*tensors, *numbers, BLOCK=BLOCK, **options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without numpy's warnings: the interpreter computes with it, and overflow is nothing special."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
