"""The forward of an affine step in segments: maps, states before segments, and all segments side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec, KernelSource
from flexsn_codegen.scan.segments import from_starts_source, starts_source, state_maps_source
from flexsn_graph import Port, Role
from flexsn_runtime.launches._entry import Entry
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.segments._kernels import SegmentKernel, rows
from flexsn_runtime.step._pointwise_step import Specialization


class SegmentedAffine:
    """Runs a forward scan of an affine step in segments, in the place of the launch of its serial kernel, to rounding.

    Args:
        serial: that launch.
        params: what it takes.
        spec, core: of that kernel.
        linear: the linear part of the step; `None`: the states depend on no states.
        sizes: integers of all kernels.
        config: how the serial kernel is launched.
        segments: their number, at least 2.
    """

    def __init__(
        self,
        serial: Launch,
        params: Sequence[Port],
        step: Specialization,
        spec: ForwardSpec,
        core: CoreSource,
        linear: CoreSource | None,
        sizes: Mapping[str, int],
        config: LaunchConfig,
        device: torch.device,
        segments: int,
    ) -> None:
        self._serial = serial
        count = len(step.state_dtypes)
        self._starts = list(step.state_dtypes)
        self._maps = [dtype for dtype in self._starts for _ in range(count)] + self._starts
        self._shape, self._device = (segments, sizes["NCL"]), device
        step.affine_segments[sizes["T"]] = segments
        sizes = {**sizes, **({} if linear is None else linear.integers), "SEGMENTS": segments}
        key, name = (spec, core.name, linear and linear.name), f"{step.name}_forward"

        def kernel(what: str, write: Callable[[], KernelSource], beside: int) -> SegmentKernel:
            return SegmentKernel(step.segment_kernel((what, *key), write), sizes, config, device, beside, params)

        self._kernels = (
            kernel("states", lambda: state_maps_source(f"{name}_maps", core, linear, spec), segments - 1),
            kernel("starts", lambda: starts_source(f"{name}_starts", core, count), 1),
            kernel("from starts", lambda: from_starts_source(f"{name}_segments", core, spec), segments),
        )

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
        scratch = self._scratch((0, 0))
        for kernel in self._kernels:
            kernel.compile(tensors, scratch)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        scratch = self._scratch(self._shape)
        for kernel in self._kernels:
            kernel(tensors, scratch)

    def _scratch(self, shape: tuple[int, int]) -> dict[Port, Tensor]:
        found = rows(Role.SEGMENT_MAP, self._maps, shape, self._device)
        return found | rows(Role.SEGMENT_START, self._starts, shape, self._device)
