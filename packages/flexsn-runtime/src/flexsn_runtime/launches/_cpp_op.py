"""An operator for compilers that launches a C++ kernel.

The kernel's source is an argument of the operator. A compiled graph therefore contains the source, and another process
can run the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_codegen.targets.cpp import CppKernel, program
from flexsn_runtime._torch_private_inductor import lower_launches
from flexsn_runtime.launches._cpp_launch import launch_program
from flexsn_runtime.launches._huge_pages import LARGE, in_huge_pages
from flexsn_runtime.launches._launch import allocator

# A compiled graph contains sources. The libraries of the 256 sources that were used last stay open.
_program = functools.lru_cache(256)(program)


@torch.library.custom_op("flexsn_runtime::launch_cpp", mutates_args=("written",), device_types="cpu")
def launch_cpp(read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], source: str) -> None:
    """Launches a C++ kernel.

    Args:
        read, written: tensors that the kernel reads, and tensors that it writes, in the order of its parameters.
        sizes: integer arguments of the kernel.
        source: source of the kernel, as returned by `CppKernel.text`.
    """
    for tensor in written:
        if tensor.nbytes >= LARGE:
            in_huge_pages(tensor)
    launch_program(_program(source), (*read, *written), sizes)


@launch_cpp.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], source: str) -> None:
    pass


_LAUNCH = torch.ops.flexsn_runtime.launch_cpp.default


class RecordedCppLaunch:
    """The launch of a C++ kernel in a graph that is being traced. Each call records one launch in the graph.

    Args:
        numbers: integer arguments of the kernel.
        block: number of elements per program.
    """

    @property
    def is_compiled(self) -> bool:
        return True

    allocator = staticmethod(allocator)

    def __init__(self, kernel: CppKernel, numbers: Sequence[int], block: int) -> None:
        self._kernel, self._numbers, self._block = kernel, numbers, block

    def entry(self) -> None:
        """Returns `None`, since tracing launches no kernel."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Does nothing: the code that runs the graph compiles the kernel."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Records a launch on these tensors, in the order of the kernel's parameters."""
        text = self._kernel.text(tuple(tensor.dtype for tensor in tensors), self._block)
        first = self._kernel.first_written
        lower_launches(_LAUNCH)
        _LAUNCH(list(tensors[:first]), list(tensors[first:]), list(self._numbers), text)
