"""The backward of a scan in segments. Three kernels compute maps, the cotangents at segment ends, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import BackwardSpec, CoreSource, KernelSource
from flexsn_codegen.scan.segments import Columns, carried_source, gradient_source, map_size, maps_source
from flexsn_graph import Port, Role
from flexsn_runtime.segments._kernels import InSegments, SegmentKernel, SerialScan, allocate_rows, register_dtype


class SegmentedBackward(InSegments[BackwardSpec]):
    """Runs a backward scan in segments instead of its serial kernel.

    Args:
        scan: the scan to run in segments.
        vjp: the VJP that the serial kernel computes.
        columns: VJP with respect to states only.
        segments: number of segments, at least 2.
    """

    def __init__(self, scan: SerialScan[BackwardSpec], vjp: CoreSource, columns: Columns, segments: int) -> None:
        super().__init__(scan)
        step, spec = scan.step, scan.spec
        step.combined[scan.sizes["T"]] = segments
        core, name = step.core(), f"{step.name}_backward"
        dtypes = [register_dtype(step.state_dtypes[i]) for i in _list_carried(spec)]
        count = map_size(spec)
        self._maps = [dtypes[i] for i in range(count) for _ in range(count)] + dtypes
        self._carried = dtypes
        self._segments = segments
        self._lifted = [
            (Port(Role.GRAD_LIFTED, i), scan.params.index(Port(Role.GRAD_LIFTED, i)))
            for i, has_gradient in enumerate(spec.grad_lifted)
            if has_gradient
        ]
        key = (vjp.name, core.name, columns.vjp and columns.vjp.name, columns.gradients)
        sizes = {**({} if columns.vjp is None else columns.vjp.integers), "SEGMENTS": segments}

        def make_kernel(task: str, write: Callable[[], KernelSource], num_parallel: int) -> SegmentKernel:
            return SegmentKernel(scan.kernel(task, key, write), scan, sizes, num_parallel)

        self._segment_kernels = (
            make_kernel("maps", lambda: maps_source(f"{name}_maps", core, vjp, columns, spec), segments - 1),
            make_kernel("carried", lambda: carried_source(f"{name}_carried", core, vjp, spec), 1),
            make_kernel("gradient", lambda: gradient_source(f"{name}_segments", core, vjp, spec), segments),
        )

    def _list_kernels(self) -> Sequence[SegmentKernel]:
        return self._segment_kernels

    def _finish(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        for port, place in self._lifted:
            # The order of the sum is fixed, so that two runs agree to the last bit.
            torch.sum(scratch[port], 0, out=tensors[place])

    def _allocate_scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        shape, device = self._choose_scratch_shape(self._segments, empty=empty), self.scan.device
        memory = allocate_rows(Role.SEGMENT_MAP, self._maps, shape, device)
        memory |= allocate_rows(Role.SEGMENT_CARRIED, self._carried, shape, device)
        for port, place in self._lifted:
            gradient = tensors[place]
            memory[port] = gradient.new_empty((0,) if empty else (self._segments, *gradient.shape))
        return memory


def _list_carried(spec: BackwardSpec) -> list[int]:
    first = len(spec.inputs)
    return [i for i in range(len(spec.states)) if spec.gradients[first + i] is not None]
