"""The forward of a scan in segments. One kernel guesses all segments in parallel, and another repairs wrong guesses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexsn_codegen import CoreSource, ForwardSpec
from flexsn_codegen.scan.segments import ended_source, repair_source, speculation_source
from flexsn_codegen.targets._entry import Entry
from flexsn_graph import Port, Role
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.segments._kernels import InSegments, SegmentKernel, SerialScan, allocate_rows, register_dtype
from flexsn_runtime.segments._speculation import Speculation

_REPAIRS = Port(Role.SEGMENT_REPAIRS, 0)


class GuessedForward(InSegments[ForwardSpec]):
    """Runs a forward scan in segments instead of its serial kernel.

    The results are bitwise equal to those of the serial kernel.

    Args:
        scan: the scan to run in segments.
        core: core of the scan's kernel.
    """

    def __init__(self, scan: SerialScan[ForwardSpec], core: CoreSource) -> None:
        super().__init__(scan)
        spec, key, name = scan.spec, (core.name,), f"{scan.step.name}_forward"
        self._dtypes = [register_dtype(dtype) for dtype in scan.step.state_dtypes]
        # Pairs of a kernel, and True if this kernel processes segments in parallel.
        self._sources: list[tuple[CompiledKernel, bool]] = [
            (scan.kernel("guess", key, lambda: speculation_source(f"{name}_guess", core, spec)), True),
            (scan.kernel("repair", key, lambda: repair_source(f"{name}_repair", core, spec)), False),
        ]
        if spec.ends and any(spec.state_seqs):
            ended_kernel = scan.kernel("ended", key, lambda: ended_source(f"{name}_ended", core, spec))
            self._sources.append((ended_kernel, True))

    def _make_kernels(self, segments: int, warm_up: int) -> list[SegmentKernel]:
        """Returns the kernels for a warm-up of `warm_up` steps."""
        sizes = {"SEGMENTS": segments, "WARM": math.ceil(warm_up / self.scan.config.chunk)}
        return [
            SegmentKernel(source, self.scan, sizes, segments if is_parallel else 1)
            for source, is_parallel in self._sources
        ]

    def _allocate(self, segments: int, *, empty: bool) -> dict[Port, Tensor]:
        shape, device = self._choose_scratch_shape(segments, empty=empty), self.scan.device
        memory = allocate_rows(Role.SEGMENT_START, self._dtypes, shape, device)
        memory |= allocate_rows(Role.SEGMENT_END, self._dtypes, shape, device)
        programs = 0 if empty else -(-self.scan.sizes["NCL"] // self.scan.config.block)
        memory[_REPAIRS] = torch.empty(programs, dtype=torch.int32, device=device)
        return memory


class SegmentedForward(GuessedForward):
    """A forward in segments whose warm-up is learned from call to call.

    Args:
        scan, core: same as for `GuessedForward`.
        speculation: the `Speculation` that learns the warm-up of the step.
    """

    def __init__(self, scan: SerialScan[ForwardSpec], core: CoreSource, speculation: Speculation) -> None:
        super().__init__(scan, core)
        self._speculation = speculation
        # Kernels by number of segments and warm-up. A process has few such pairs.
        self._by_warm_up: dict[tuple[int, int], list[SegmentKernel]] = {}

    @property
    def is_compiled(self) -> bool:
        return self.scan.launch.is_compiled if self._count_segments() < 2 else super().is_compiled

    def entry(self) -> Entry | None:
        # The warm-up never becomes shorter, so a serial scan remains serial.
        return self.scan.launch.entry() if self._count_segments() < 2 else super().entry()

    def compile(self, tensors: Sequence[Tensor]) -> None:
        if self._count_segments() < 2:
            self.scan.launch.compile(tensors)
        else:
            super().compile(tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        if self._count_segments() < 2:
            self.scan.launch(tensors)
        else:
            super().__call__(tensors)

    def _finish(self, tensors: Sequence[Tensor], scratch: Mapping[Port, Tensor]) -> None:
        self._speculation.observe(
            scratch[_REPAIRS], self._count_segments(), self.scan.sizes["NCL"], self.scan.config.block
        )

    def _count_segments(self) -> int:
        sizes = self.scan.sizes
        return min(self._speculation.count(sizes["NCL"], sizes["T"]), sizes["T"] // self.scan.config.chunk)

    def _list_kernels(self) -> list[SegmentKernel]:
        key = segments, warm_up = self._count_segments(), self._speculation.warm_up
        kernels = self._by_warm_up.get(key)
        if kernels is None:
            kernels = self._by_warm_up[key] = self._make_kernels(segments, warm_up)
        return kernels

    def _allocate_scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        return self._allocate(self._count_segments(), empty=empty)


class ForwardAhead(GuessedForward):
    """A forward in segments in a program that is compiled ahead of time, and therefore cannot learn a warm-up.

    Args:
        scan, core: same as for `GuessedForward`. Sizes may be symbols.
        segments: number of segments, at least 1. It may be a symbol.
        warm_up: warm-up in steps.
    """

    def __init__(self, scan: SerialScan[ForwardSpec], core: CoreSource, segments: int, warm_up: int) -> None:
        super().__init__(scan, core)
        self._segments, self._segment_kernels = segments, self._make_kernels(segments, warm_up)

    def _list_kernels(self) -> list[SegmentKernel]:
        return self._segment_kernels

    def _allocate_scratch(self, tensors: Sequence[Tensor], *, empty: bool = False) -> dict[Port, Tensor]:
        return self._allocate(self._segments, empty=empty)
