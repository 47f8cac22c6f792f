"""The forward of an affine step in segments: maps, states before segments, and all segments side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec, KernelSource
from flexsn_codegen.scan.segments import from_starts_source, starts_source, state_maps_source
from flexsn_graph import Port, Role
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.segments._kernels import InSegments, SegmentKernel, rows
from flexsn_runtime.step._pointwise_step import Specialization


class SegmentedAffine(InSegments):
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
        count = len(step.state_dtypes)
        self._starts = list(step.state_dtypes)
        self._maps = [dtype for dtype in self._starts for _ in range(count)] + self._starts
        self._shape, self._device = (segments, sizes["NCL"]), device
        step.affine_segments[sizes["T"]] = segments
        sizes = {**sizes, **({} if linear is None else linear.integers), "SEGMENTS": segments}
        key, name = (spec, core.name, linear and linear.name), f"{step.name}_forward"

        def kernel(what: str, write: Callable[[], KernelSource], beside: int) -> SegmentKernel:
            return SegmentKernel(step.segment_kernel((what, *key), write), sizes, config, device, beside, params)

        kernels = (
            kernel("states", lambda: state_maps_source(f"{name}_maps", core, linear, spec), segments - 1),
            kernel("starts", lambda: starts_source(f"{name}_starts", core, count), 1),
            kernel("from starts", lambda: from_starts_source(f"{name}_segments", core, spec), segments),
        )
        super().__init__(serial, kernels)

    def _scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        shape = (0, 0) if empty else self._shape
        found = rows(Role.SEGMENT_MAP, self._maps, shape, self._device)
        return found | rows(Role.SEGMENT_START, self._starts, shape, self._device)
