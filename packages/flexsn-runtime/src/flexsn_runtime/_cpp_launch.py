"""Launches a kernel in C++: addresses and numbers in the order of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen.targets.cpp import CppKernel
from flexsn_runtime._buckets import LaunchConfig
from flexsn_runtime._huge_pages import in_huge_pages
from flexsn_runtime._program import CompiledKernel

# Bytes of a result from which on its memory is asked for in huge pages.
_MIN_HUGE = 2**23

# Fewer elements, over all steps, take less time than waking a thread.
_MIN_PER_THREAD = 2**14


class CppLaunch:
    """Runs a kernel over `sizes["NCL"]` elements and `sizes["T"]` steps, as often as it is called.

    The elements are shared out among as many threads as `torch.set_num_threads` says.

    Args:
        sizes: at least the kernel's integer arguments.
    """

    def __init__(self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig) -> None:
        self._function: CppKernel = kernel.function
        self._numbers = tuple(sizes[name] for name in kernel.sizes)
        self._block = config.block
        programs = -(-sizes["NCL"] // config.block)
        self._most_threads = max(1, min(programs, sizes["NCL"] * sizes["T"] // _MIN_PER_THREAD))
        self._run: Callable[[Sequence[int]], None] | None = None

    @property
    def is_compiled(self) -> bool:
        return self._run is not None

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles for tensors of these dtypes, without launching."""
        self._run = self._function.compiled(tuple(t.dtype for t in tensors), self._block)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches; `tensors` are in the order of the kernel's parameters."""
        if self._run is None:
            self.compile(tensors)
            assert self._run is not None
        for tensor in tensors[self._function.first_written :]:
            if tensor.nbytes >= _MIN_HUGE:
                in_huge_pages(tensor)
        threads = 1 if self._most_threads == 1 else min(self._most_threads, torch.get_num_threads())
        self._run([*[t.data_ptr() for t in tensors], *self._numbers, threads])
