"""Launches C++ kernels. A launch passes addresses and integers, in the order of the kernel's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_codegen.targets.cpp import CppKernel, Program
from flexsn_runtime.launches import _large_memory
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig


def launch_program(run: Callable[[Sequence[int]], None], tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Runs a compiled C++ program. `torch.set_num_threads` limits the number of its threads.

    Args:
        run: function that `flexsn_codegen.targets.cpp.program` returned.
        tensors: tensors in the order of the kernel's parameters.
        numbers: integer arguments of the kernel.
    """
    run([*map(Tensor.data_ptr, tensors), *numbers, torch.get_num_threads()])


class CppLaunch:
    """Runs a kernel over `sizes["NCL"]` elements and `sizes["T"]` steps, any number of times.

    Args:
        sizes: sizes by name, including all integer arguments of the kernel.
    """

    allocator = staticmethod(_large_memory.allocator)

    def __init__(self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig) -> None:
        self._function: CppKernel = kernel.function
        self._numbers = tuple(sizes[name] for name in kernel.sizes)
        self._block = config.block
        self._fast_math = kernel.options["enable_fp_fusion"]
        self._run: Program | None = None

    @property
    def is_compiled(self) -> bool:
        return self._run is not None

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles the kernel for the dtypes of these tensors, without launching it."""
        dtypes = tuple(t.dtype for t in tensors)
        self._run = self._function.compiled(dtypes, self._block, fast_math=self._fast_math)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel on tensors in the order of its parameters."""
        if self._run is None:
            self.compile(tensors)
            assert self._run is not None
        run = self._run  # the same work as in `launch_program`, without the time of a function call
        run.function(run.pack(*map(Tensor.data_ptr, tensors), *self._numbers, torch.get_num_threads()))

    def entry(self) -> Entry | None:
        """Returns the data for a launch by address; `None` if the kernel is not compiled."""
        run = self._run
        return None if run is None else Entry(run.address, self._numbers, 1, 1, 0, run, unwatched)

    def at(self, example: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """See `LaunchByAddress.at`."""
        if self._run is None:
            self.compile(example)
        run = self._run
        assert run is not None
        integers = (*self._numbers, torch.get_num_threads())
        return lambda number: run((*addresses[number], *integers))
