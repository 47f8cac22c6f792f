"""Launches Triton kernels. A launch passes tensors and integers, in the order of the kernel's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry
from flexsn_codegen.targets.triton import entry, interpreting, launcher, on_device, prepare_compiler
from flexsn_codegen.targets.triton._launcher import load
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig


def allocator(
    shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Returns `torch.empty_strided` with these arguments bound. A call takes half the time of `torch.empty`."""
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


class Launch:
    """Runs a kernel over `sizes["NCL"]` elements and `sizes["T"]` steps, any number of times.

    Each program computes one block of the `sizes["NCL"]` elements. If the kernel processes rows, each program computes
    one block of `sizes["ROW"]` elements. If the kernel processes segments in parallel, each of the `sizes["BESIDE"]`
    segments has its own programs.

    Args:
        sizes: sizes by name, including all integer arguments of the kernel.
        device: device of the tensors that each call receives. Triton compiles once, for the alignments in the first
            call, so the tensor at a given position must be aligned to 16 bytes in all calls or in no call.

    Attributes:
        programs: number of programs that compute a step, each for one block of elements.
    """

    allocator = staticmethod(allocator)

    def __init__(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> None:
        self._function = kernel.function
        self._numbers = tuple(sizes[name] for name in kernel.sizes)
        self.programs = -(-sizes["ROW" if "ROW" in kernel.sizes else "NCL"] // config.block)
        self._grid = (self.programs, sizes["BESIDE"] if "BESIDE" in kernel.sizes else 1, 1)
        self._block = config.block
        self._options = {"num_warps": config.num_warps, **kernel.options}
        self._device = device
        # A function that the first launch sets. It launches the kernel without Triton's search for the matching binary.
        self._relaunch: Callable[[Sequence[Tensor]], None] | None = None
        self._entry: Entry | None = None

    @property
    def is_compiled(self) -> bool:
        return self._relaunch is not None or triton_interpreted()

    def entry(self) -> Entry | None:
        """Returns the data for a launch by address; `None` before the first launch, or if Triton provides no data."""
        return self._entry

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles the kernel for the dtypes and alignments of these tensors, without launching it."""
        prepare_compiler()
        with on_device(self._device):
            load(self._function.warmup(*tensors, *self._numbers, BLOCK=self._block, grid=self._grid, **self._options))

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel on tensors in the order of its parameters."""
        if self._relaunch is not None:
            self._relaunch(tensors)
        elif triton_interpreted():
            with interpreting():
                self._function[self._grid](*tensors, *self._numbers, BLOCK=self._block)
        else:
            with on_device(self._device):
                compiled = self._function[self._grid](*tensors, *self._numbers, BLOCK=self._block, **self._options)
            if compiled is not None:
                numbers = (*self._numbers, self._block)
                self._relaunch = launcher(compiled, self._grid, numbers, self._device)
                self._entry = entry(compiled, self._grid, numbers)
