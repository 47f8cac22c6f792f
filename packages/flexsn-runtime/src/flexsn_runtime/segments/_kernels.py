"""Kernels of segments: launches with scratch memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_graph import Port, Role
from flexsn_runtime.launches._entry import Entry
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch, launch
from flexsn_runtime.plans._buckets import LaunchConfig

# As the device holds them in registers.
_KEPT = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype pass from kernel to kernel without rounding."""
    return _KEPT.get(dtype, dtype)


class SegmentKernel:
    """One of the kernels of a scan in segments.

    Args:
        sizes: as for `launch`; with ``"SEGMENTS"``.
        beside: segments that run side by side.
        params: of the scan, in the order of the tensors that it is called with.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        sizes: Mapping[str, int],
        config: LaunchConfig,
        device: torch.device,
        beside: int,
        params: Sequence[Port],
    ) -> None:
        self._launch: Launch = launch(kernel, {**sizes, "BESIDE": beside}, config, device)
        places = {port: i for i, port in enumerate(params)}
        self._takes = [(port, places.get(port)) for port in kernel.params]

    def __call__(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Launches on the scan's tensors; `scratch` holds the others, and those that stand for some of these."""
        self._launch(self._arguments(tensors, scratch))

    def compile(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Compiles for tensors like these, without launching."""
        self._launch.compile(self._arguments(tensors, scratch))

    @property
    def is_compiled(self) -> bool:
        return self._launch.is_compiled

    def _arguments(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> list[Tensor]:
        found = []
        for port, place in self._takes:
            one = scratch.get(port)
            if one is None:
                assert place is not None, port
                one = tensors[place]
            found.append(one)
        return found


def rows(role: Role, dtypes: Sequence[torch.dtype], shape: tuple[int, int], device: torch.device) -> dict[Port, Tensor]:
    """Scratch memory `[segments, elements]` for each of a role."""
    return {Port(role, i): torch.empty(shape, dtype=dtype, device=device) for i, dtype in enumerate(dtypes)}


class InSegments:
    """Runs a scan by several kernels, in the place of the launch of its serial kernel.

    Args:
        serial: that launch.
        kernels: in their order.
    """

    def __init__(self, serial: Launch, kernels: Sequence[SegmentKernel]) -> None:
        self._serial, self._kernels = serial, tuple(kernels)

    @property
    def is_compiled(self) -> bool:
        return all(kernel.is_compiled for kernel in self._kernels)

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        return self._serial.allocator(shape, strides, dtype=dtype, device=device)

    def entry(self) -> Entry | None:
        return None  # several kernels

    def compile(self, tensors: Sequence[Tensor]) -> None:
        scratch = self._scratch(tensors, empty=True)
        for kernel in self._kernels:
            kernel.compile(tensors, scratch)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        scratch = self._scratch(tensors)
        for kernel in self._kernels:
            kernel(tensors, scratch)
        self._finish(tensors, scratch)

    def _scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        """The memory that kernels hand each other; `empty`: without elements, to compile for."""
        raise NotImplementedError

    def _finish(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        """Does what follows the last kernel."""
