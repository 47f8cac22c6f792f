"""Launches of a compiled Triton kernel, for kernels that are launched many times."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flexsn_codegen.targets._entry import Entry

_HERE: AbstractContextManager[object] = nullcontext()
_PREPARING = threading.Lock()


def prepare_driver() -> None:
    """Loads Triton's driver. If Triton's cache is empty, a C compiler first compiles the driver, in half a second."""
    with _PREPARING:
        _load_driver()


def prepare_compiler() -> None:
    """Performs the steps of a process's first compilation that do not depend on the kernel.

    If several threads call this function at the same time, one thread performs the steps, and the other threads wait.
    """
    with _PREPARING:
        _load_driver()
        _read_compiler()


@functools.cache
def _load_driver() -> None:
    from flexsn_codegen.targets.triton import _triton_private  # imports triton, which need not be installed

    _triton_private.load_driver()


@functools.cache
def _read_compiler() -> None:
    from flexsn_codegen.targets.triton import _triton_private

    _triton_private.read_compiler()


def launcher(
    compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Creates a function of the tensors that launches a compiled kernel on the current stream of `device`.

    The function launches the kernel like `compiled[grid]`, but without the preparations for hooks of profilers. These
    preparations take half of the time of `compiled[grid]`. If hooks are installed, or if this version of Triton
    launches kernels in another way, the function calls `compiled[grid]`.

    Args:
        compiled: the result of `kernel[grid](...)`. It is compiled for the tensors' dtypes and alignments to 16 bytes,
            and for some properties of the numbers. All of these have to be the same in each launch. Launches do not
            check them.
        grid: the grid of each launch.
        numbers: the arguments of each launch after the tensors, including constants.
        device: a GPU, which need not be the current device.
    """
    from flexsn_codegen.targets.triton import _triton_private  # imports triton, which need not be installed

    launch = _triton_private.launcher(compiled, grid, numbers, device)
    if _single_device():
        return launch

    def launch_there(tensors: Sequence[torch.Tensor]) -> None:
        with on_device(device):
            launch(tensors)

    return launch_there


def load(compiled: Any) -> None:
    """Loads the result of `kernel.warmup(...)` on the current device, and compiles its launcher."""
    from flexsn_codegen.targets.triton import _triton_private  # imports triton, which need not be installed

    _triton_private.load(compiled)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context that makes `device` current for a launch, because Triton launches on the current device."""
    if _single_device() or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def _single_device() -> bool:
    return torch.cuda.device_count() == 1


def entry(compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...]) -> Entry | None:
    """The data with which the compiled launcher launches a kernel on an NVIDIA GPU, without Python.

    Args:
        compiled, grid, numbers: see `launcher`.

    Returns:
        The entry. `None` if the GPU is an AMD GPU, if the grid has three dimensions, if the kernel has arguments other
        than tensors, constants, float32 numbers, and integers of 32 or 64 bits, if the launch needs special attributes
        or additional memory, or if this version of Triton does not report the arguments.
    """
    from flexsn_codegen.targets.triton import _triton_private

    return _triton_private.entry(compiled, grid, numbers)
