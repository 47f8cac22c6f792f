"""The backward of a scan in segments: maps, what comes to each segment, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import BackwardSpec, CoreSource
from flexsn_codegen.scan.segments import Columns, carried_source, gradient_source, map_size, maps_source
from flexsn_graph import Port, Role
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.segments._kernels import InSegments, SegmentKernel, kept_dtype, rows
from flexsn_runtime.step._pointwise_step import Specialization


class SegmentedBackward(InSegments):
    """Runs a backward scan in segments, in the place of the launch of its serial kernel.

    Args:
        serial: that launch.
        params: what it takes.
        spec, vjp: of that kernel.
        columns: the VJP of states alone.
        sizes: integers of all kernels.
        config: how the serial kernel is launched.
        segments: their number, at least 2.
    """

    def __init__(
        self,
        serial: Launch,
        params: Sequence[Port],
        step: Specialization,
        spec: BackwardSpec,
        vjp: CoreSource,
        columns: Columns,
        sizes: Mapping[str, int],
        config: LaunchConfig,
        device: torch.device,
        segments: int,
    ) -> None:
        step.combined[sizes["T"]] = segments
        core, name = step.core(), f"{step.name}_backward"
        dtypes = [kept_dtype(step.state_dtypes[i]) for i in _carried(spec)]
        count = map_size(spec)
        self._maps = [dtypes[i] for i in range(count) for _ in range(count)] + dtypes
        self._carried = dtypes
        self._shape, self._device = (segments, sizes["NCL"]), device
        self._lifted = [
            (Port(Role.GRAD_LIFTED, i), params.index(Port(Role.GRAD_LIFTED, i)))
            for i, wanted in enumerate(spec.grad_lifted)
            if wanted
        ]
        key = (spec, vjp.name, core.name, columns.vjp and columns.vjp.name, columns.gradients)
        sizes = {**sizes, "SEGMENTS": segments}

        def kernel(what: str, write: Callable[[], object], beside: int) -> SegmentKernel:
            made = step.segment_kernel((what, *key), write)  # type: ignore[arg-type]
            return SegmentKernel(made, sizes, config, device, beside, params)

        kernels = (
            kernel("maps", lambda: maps_source(f"{name}_maps", core, vjp, columns, spec), segments - 1),
            kernel("carried", lambda: carried_source(f"{name}_carried", core, vjp, spec), 1),
            kernel("gradient", lambda: gradient_source(f"{name}_segments", core, vjp, spec), segments),
        )
        super().__init__(serial, kernels)

    def _finish(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        for port, place in self._lifted:
            # In a fixed order, so that two runs agree to the last bit.
            torch.sum(scratch[port], 0, out=tensors[place])

    def _scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        shape = (0, 0) if empty else self._shape
        found = rows(Role.SEGMENT_MAP, self._maps, shape, self._device)
        found |= rows(Role.SEGMENT_CARRIED, self._carried, shape, self._device)
        for port, place in self._lifted:
            whole = tensors[place]
            found[port] = whole.new_empty((0,) if empty else (self._shape[0], *whole.shape))
        return found


def _carried(spec: BackwardSpec) -> list[int]:
    first = len(spec.inputs)
    return [i for i in range(len(spec.states)) if spec.gradients[first + i] is not None]
