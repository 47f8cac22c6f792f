"""The target CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexsn_codegen.errors import UnsupportedOpError
from flexsn_codegen.source._source import KernelSource, Strided
from flexsn_codegen.targets._base import KernelWriter
from flexsn_codegen.targets.cpp._target import Cpp
from flexsn_codegen.targets.cuda._kernel import CudaKernel
from flexsn_graph import ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER

_RANDOM = frozenset({ELEMENT_WORD, NORMAL_NUMBER, UNIFORM_NUMBER})


class Cuda(Cpp):
    """The target whose functions of one element are those of `Cpp`. Its kernels are loops of recurrent steps.

    Kernels include no header of `Cpp` except `numbers.h`, so they lack special functions and random numbers.
    """

    name = "CUDA C++"
    once = False
    header = '#include "device.cuh"\n#include "cluster.cuh"\n'

    def __init__(self) -> None:
        super().__init__()
        self.rules = {op: rule for op, rule in self.rules.items() if op not in _RANDOM and not _is_special(rule)}

    def writer(self, strided: Strided = (), sizes: Sequence[str] = ("T", "NCL")) -> KernelWriter:
        raise UnsupportedOpError("CUDA C++ kernels can only be loops of recurrent steps.", "writer")

    def compile(self, source: KernelSource) -> Any:
        return CudaKernel(source)


def _is_special(rule: object) -> bool:
    """True for the rule of a function from the C++ target's `special.h`."""
    return "_add_special" in getattr(rule, "__qualname__", "") or getattr(rule, "__name__", "") == "_polygamma"


CUDA = Cuda()
