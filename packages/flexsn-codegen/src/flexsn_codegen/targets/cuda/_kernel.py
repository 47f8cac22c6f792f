"""A CUDA C++ kernel, compiled for the dtypes of its tensors and for a GPU before its first launch with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_codegen.source._source import KernelSource
from flexsn_codegen.targets.cpp._literals import cpp_name
from flexsn_codegen.targets.cuda._driver import CudaFunction
from flexsn_codegen.targets.cuda._nvrtc import cubin


class CudaKernel:
    """A kernel in CUDA C++. Each combination of dtypes, GPU, launch parameters and `fast_math` has a separate function.

    Attributes:
        __name__: name of the kernel's function.
    """

    def __init__(self, source: KernelSource) -> None:
        self.__name__ = source.name
        self._source = source
        self._functions: dict[object, CudaFunction] = {}

    def text(self, dtypes: Sequence[torch.dtype]) -> str:
        """The source of the kernel for tensors of these dtypes."""
        names = zip(self._source.params, dtypes, strict=True)
        types = "\n".join(f"using {port.name}_t = {cpp_name(dtype)};" for port, dtype in names)
        header = self._source.target.header
        assert self._source.source.startswith(header)
        return f"{header}\n{types}\n{self._source.source.removeprefix(header)}"

    def cubin(self, dtypes: Sequence[torch.dtype], capability: tuple[int, int], *, fast_math: bool = False) -> bytes:
        """The compiled kernel. The compilation needs no GPU. Raises the errors of `_nvrtc.cubin`."""
        return cubin(self.text(dtypes), capability, fast_math=fast_math)

    def compiled(
        self,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        cluster: int,
        threads: int,
        shared: int,
        fast_math: bool = False,
    ) -> CudaFunction:
        """The kernel for these dtypes, loaded on a GPU. See `CudaFunction` for the arguments.

        Raises:
            CompilationError: the kernel cannot be compiled, or the GPU has too few resources for it.
        """
        key = (tuple(dtypes), device, cluster, threads, shared, fast_math)
        function = self._functions.get(key)
        if function is None:
            compiled = self.cubin(dtypes, torch.cuda.get_device_capability(device), fast_math=fast_math)
            function = CudaFunction(compiled, self.__name__, device, cluster=cluster, threads=threads, shared=shared)
            self._functions[key] = function
        return function
