"""Launches a kernel whose blocks form clusters: the GPU runs those of one cluster at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_codegen.targets.cuda import Cluster, ClusterKernel, CudaFunction, CudaKernel


class ClusterLaunch:
    """A kernel in clusters, compiled for the dtypes of the first tensors that it is called with.

    Args:
        width: columns of the step.
    """

    def __init__(self, kernel: ClusterKernel, cluster: Cluster, device: torch.device, *, fast_math: bool) -> None:
        self._kernel, self._cluster, self._device, self._fast_math = kernel, cluster, device, fast_math
        self._compiled = CudaKernel(kernel.source)
        self._functions: dict[tuple[torch.dtype, ...], CudaFunction] = {}

    def function(self, tensors: Sequence[Tensor]) -> CudaFunction:
        """Returns the kernel for tensors of these dtypes; compiles it if need be.

        Raises:
            CompilationError: the GPU has no room for it.
        """
        dtypes = tuple([tensor.dtype for tensor in tensors])
        found = self._functions.get(dtypes)
        if found is None:
            found = self._functions[dtypes] = self._compiled.compiled(
                dtypes,
                self._device,
                cluster=self._cluster.blocks,
                threads=self._kernel.threads,
                shared=self._kernel.shared,
                fast_math=self._fast_math,
            )
        return found

    def text(self, tensors: Sequence[Tensor]) -> str:
        """Source of the kernel for tensors of these dtypes."""
        return self._compiled.text([tensor.dtype for tensor in tensors])

    def launch(self, tensors: Sequence[Tensor], groups: int, numbers: Sequence[int]) -> LaunchedClusters:
        """The launch on tensors like these, of a cluster for each group of rows.

        The GPU runs at a time those that it has room for.
        """
        return LaunchedClusters(self.function(tensors), groups * self._cluster.blocks, tuple(numbers))


@dataclass(frozen=True, slots=True)
class LaunchedClusters:
    """A kernel in clusters with its numbers."""

    function: CudaFunction
    blocks: int
    numbers: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches it."""
        self.function(self.blocks, [tensor.data_ptr() for tensor in tensors], self.numbers)

    def entry(self) -> Entry:
        """How it is launched by its address."""
        function = self.function
        return Entry(
            function.address, self.numbers, self.blocks, function.threads, function.shared, function, unwatched
        )
