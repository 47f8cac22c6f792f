"""The forward of a scan in segments: guesses side by side, then what has to be repaired."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec
from flexsn_codegen.scan.segments import ended_source, repair_source, speculation_source
from flexsn_graph import Port, Role
from flexsn_runtime.launches._entry import Entry
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig
from flexsn_runtime.segments._kernels import SegmentKernel, kept_dtype, rows
from flexsn_runtime.segments._speculation import Speculation
from flexsn_runtime.step._pointwise_step import Specialization

_REPAIRS = Port(Role.SEGMENT_REPAIRS, 0)


class SegmentedForward:
    """Runs a forward scan in segments, in the place of the launch of its serial kernel; equal to it to the last bit.

    Args:
        serial: that launch.
        params: what it takes.
        spec, core: of that kernel.
        sizes: integers of all kernels.
        config: how the serial kernel is launched.
        speculation: the step's.
    """

    def __init__(
        self,
        serial: Launch,
        params: Sequence[Port],
        step: Specialization,
        spec: ForwardSpec,
        core: CoreSource,
        sizes: Mapping[str, int],
        config: LaunchConfig,
        device: torch.device,
        speculation: Speculation,
    ) -> None:
        self._serial, self._params, self._speculation = serial, params, speculation
        self._sizes, self._config, self._device = dict(sizes), config, device
        self._dtypes = [kept_dtype(dtype) for dtype in step.state_dtypes]
        key, name = (spec, core.name), step.name
        # Each with True if segments run side by side in it.
        self._sources: list[tuple[CompiledKernel, bool]] = [
            (
                step.segment_kernel(("guess", *key), lambda: speculation_source(f"{name}_forward_guess", core, spec)),
                True,
            ),
            (step.segment_kernel(("repair", *key), lambda: repair_source(f"{name}_forward_repair", core, spec)), False),
        ]
        if spec.ends and any(spec.state_seqs):
            ended = step.segment_kernel(("ended", *key), lambda: ended_source(f"{name}_forward_ended", core, spec))
            self._sources.append((ended, True))
        self._programs = -(-sizes["NCL"] // config.block)
        # By the number of segments and the warm-up, of which there are few in a process.
        self._kernels: dict[tuple[int, int], list[SegmentKernel]] = {}

    @property
    def is_compiled(self) -> bool:
        segments = self._segments()
        kernels = self._kernels.get((segments, self._warm_up()))
        if segments < 2:
            return self._serial.is_compiled
        return kernels is not None and all(kernel.is_compiled for kernel in kernels)

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        return self._serial.allocator(shape, strides, dtype=dtype, device=device)

    def entry(self) -> Entry | None:
        return self._serial.entry() if self._segments() < 2 else None  # once serial, it remains so

    def compile(self, tensors: Sequence[Tensor]) -> None:
        segments = self._segments()
        if segments < 2:
            self._serial.compile(tensors)
            return
        scratch = self._scratch(0)
        for kernel in self._made(segments):
            kernel.compile(tensors, scratch)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        segments = self._segments()
        if segments < 2:
            self._serial(tensors)
            return
        scratch = self._scratch(segments)
        for kernel in self._made(segments):
            kernel(tensors, scratch)
        self._speculation.observe(scratch[_REPAIRS], segments, segments * self._sizes["NCL"])

    def _segments(self) -> int:
        number = self._speculation.count(self._sizes["NCL"], self._sizes["T"])
        return min(number, self._sizes["T"] // self._config.chunk)

    def _warm_up(self) -> int:
        """In chunks."""
        return math.ceil(self._speculation.warm_up / self._config.chunk)

    def _made(self, segments: int) -> list[SegmentKernel]:
        key = segments, self._warm_up()
        found = self._kernels.get(key)
        if found is None:
            sizes = {**self._sizes, "SEGMENTS": segments, "WARM": key[1]}
            found = self._kernels[key] = [
                SegmentKernel(source, sizes, self._config, self._device, segments if is_beside else 1, self._params)
                for source, is_beside in self._sources
            ]
        return found

    def _scratch(self, segments: int) -> dict[Port, Tensor]:
        shape = (segments, self._sizes["NCL"] if segments else 0)
        found = rows(Role.SEGMENT_START, self._dtypes, shape, self._device)
        found |= rows(Role.SEGMENT_END, self._dtypes, shape, self._device)
        programs = self._programs if segments else 0
        found[_REPAIRS] = torch.empty(programs, dtype=torch.int32, device=self._device)
        return found
