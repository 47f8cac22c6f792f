"""A kernel that Triton has compiled, launched again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flexsn_codegen.targets._entry import Entry

_HERE: AbstractContextManager[object] = nullcontext()


def launcher(
    compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Makes a function of the tensors that launches a compiled kernel on the current stream of `device`.

    `numbers` follow the tensors. The function does what `compiled[grid]` does, without its preparations for profilers'
    hooks, half of its time. Where hooks are installed, or this version of Triton launches in another way,
    `compiled[grid]` launches.

    Args:
        compiled: what `kernel[grid](...)` returned. It is for dtypes, alignments to 16 bytes and some properties of the
            numbers, which have to be the same in each launch; launches do not check them.
        grid: of each launch.
        numbers: of each launch, the constant ones too.
        device: a GPU, whether or not it is the current one.
    """
    from flexsn_codegen.targets.triton import _triton_private  # imports triton, which need not be installed

    launch = _triton_private.launcher(compiled, grid, numbers, device)
    if _single_device():
        return launch

    def launch_there(tensors: Sequence[torch.Tensor]) -> None:
        with on_device(device):
            launch(tensors)

    return launch_there


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context for a launch: Triton launches on the current device, which need not be the tensors'."""
    if _single_device() or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def _single_device() -> bool:
    return torch.cuda.device_count() == 1


def entry(compiled: Any, grid: tuple[int, int, int], numbers: tuple[float, ...]) -> Entry | None:
    """How to launch a compiled kernel without Python, on an NVIDIA GPU.

    Args:
        compiled, grid, numbers: as for `launcher`.

    Returns:
        `None` for a kernel that takes more than tensors and numbers of 8 bytes, or is launched in a way of its own, and
        where this version of Triton does not report the arguments.
    """
    from flexsn_codegen.targets.triton import _triton_private

    return _triton_private.entry(compiled, grid, numbers)
