"""An operator for compilers that launches a C++ kernel.

The kernel's source is an argument of the operator, so that a compiled program contains the source when another process
runs the program.
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

# Compiled graphs contain sources. The libraries of the sources that ran last stay open, up to this number.
_program = functools.lru_cache(256)(program)


@torch.library.custom_op("flexsn_runtime::launch_cpp", mutates_args=("written",), device_types="cpu")
def launch_cpp(read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], source: str) -> None:
    """Launches a kernel.

    Args:
        read, written: tensors that the kernel reads, and tensors that it writes, in order.
        sizes: integer arguments of the kernel.
        source: source from `CppKernel.text`.
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
    """Records a launch each time it is called.

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
        """Returns `None`, since this process does not launch the kernel."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Does nothing: the code that runs the graph compiles the kernel."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Records a launch on these tensors, in the order of the kernel's parameters."""
        text = self._kernel.text(tuple(tensor.dtype for tensor in tensors), self._block)
        first = self._kernel.first_written
        lower_launches(_LAUNCH)
        _LAUNCH(list(tensors[:first]), list(tensors[first:]), list(self._numbers), text)
