"""The forward of an affine step in segments. Three kernels compute maps, states at segment starts, and segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec, KernelSource
from flexsn_codegen.scan.segments import from_starts_source, starts_source, state_maps_source
from flexsn_graph import Port, Role
from flexsn_runtime.segments._kernels import InSegments, SegmentKernel, SerialScan, allocate_rows


class SegmentedAffine(InSegments[ForwardSpec]):
    """Runs the forward of an affine step in segments instead of its serial kernel.

    The results are equal to those of the serial kernel up to rounding.

    Args:
        scan: the scan to run in segments.
        core: core of the scan's kernel.
        linear: the linear part of the step; `None` if no state depends on states.
        segments: number of segments, at least 2.
    """

    def __init__(
        self, scan: SerialScan[ForwardSpec], core: CoreSource, linear: CoreSource | None, segments: int
    ) -> None:
        super().__init__(scan)
        step, spec = scan.step, scan.spec
        count = len(step.state_dtypes)
        self._starts = list(step.state_dtypes)
        self._maps = [dtype for dtype in self._starts for _ in range(count)] + self._starts
        self._segments = segments
        step.affine_segments[scan.sizes["T"]] = segments
        sizes = {**({} if linear is None else linear.integers), "SEGMENTS": segments}
        key, name = (core.name, linear and linear.name), f"{step.name}_forward"

        def make_kernel(task: str, write: Callable[[], KernelSource], num_parallel: int) -> SegmentKernel:
            return SegmentKernel(scan.kernel(task, key, write), scan, sizes, num_parallel)

        self._segment_kernels = (
            make_kernel("states", lambda: state_maps_source(f"{name}_maps", core, linear, spec), segments - 1),
            make_kernel("starts", lambda: starts_source(f"{name}_starts", core, count), 1),
            make_kernel("from starts", lambda: from_starts_source(f"{name}_segments", core, spec), segments),
        )

    def _list_kernels(self) -> Sequence[SegmentKernel]:
        return self._segment_kernels

    def _allocate_scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        shape, device = self._choose_scratch_shape(self._segments, empty=empty), self.scan.device
        memory = allocate_rows(Role.SEGMENT_MAP, self._maps, shape, device)
        return memory | allocate_rows(Role.SEGMENT_START, self._starts, shape, device)
