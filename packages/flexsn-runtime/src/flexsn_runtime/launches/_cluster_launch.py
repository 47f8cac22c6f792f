"""Launches a kernel whose blocks form clusters. The GPU runs the blocks of one cluster at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_codegen.targets.cuda import Cluster, ClusterKernel, CudaFunction, CudaKernel


class ClusterLaunch:
    """A kernel with clusters, which is compiled once for each combination of dtypes of its tensors.

    Args:
        kernel: source of the kernel, and the threads and shared memory of a block.
        cluster: number of blocks in a cluster, and other facts about the division of a step.
        fast_math: argument of `CudaKernel.compiled`.
    """

    def __init__(self, kernel: ClusterKernel, cluster: Cluster, device: torch.device, *, fast_math: bool) -> None:
        self._kernel, self._cluster, self._device, self._fast_math = kernel, cluster, device, fast_math
        self._compiled = CudaKernel(kernel.source)
        self._functions: dict[tuple[torch.dtype, ...], CudaFunction] = {}

    def function(self, tensors: Sequence[Tensor]) -> CudaFunction:
        """Returns the kernel for the dtypes of these tensors. Compiles the kernel if necessary.

        Raises:
            CompilationError: the GPU has too few resources for the kernel.
        """
        dtypes = tuple([tensor.dtype for tensor in tensors])
        compiled = self._functions.get(dtypes)
        if compiled is None:
            compiled = self._functions[dtypes] = self._compiled.compiled(
                dtypes,
                self._device,
                cluster=self._cluster.blocks,
                threads=self._kernel.threads,
                shared=self._kernel.shared,
                fast_math=self._fast_math,
            )
        return compiled

    def text(self, tensors: Sequence[Tensor]) -> str:
        """Returns the source of the kernel for the dtypes of these tensors."""
        return self._compiled.text([tensor.dtype for tensor in tensors])

    def launch(self, tensors: Sequence[Tensor], groups: int, numbers: Sequence[int]) -> LaunchedClusters:
        """Returns the launch on tensors with the dtypes of `tensors`, with one cluster for each group of rows.

        If the GPU cannot run all clusters at the same time, some clusters start when earlier clusters have finished.
        """
        return LaunchedClusters(self.function(tensors), groups * self._cluster.blocks, tuple(numbers))


@dataclass(frozen=True, slots=True)
class LaunchedClusters:
    """A kernel with clusters, and its numeric arguments."""

    function: CudaFunction
    blocks: int
    numbers: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel."""
        self.function(self.blocks, [tensor.data_ptr() for tensor in tensors], self.numbers)

    def entry(self) -> Entry:
        """Returns the data for a launch by address."""
        function = self.function
        return Entry(
            function.address, self.numbers, self.blocks, function.threads, function.shared, function, unwatched
        )
