"""The Triton backend: on GPUs or, slowly, in Triton's interpreter."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.library import wrap_triton

from flexsn_codegen import TRITON
from flexsn_codegen.targets.cuda import why_no_nvrtc
from flexsn_codegen.targets.triton import prepare_driver
from flexsn_runtime._availability import triton_interpreted, why_no_triton
from flexsn_runtime.backend._backend import Backend
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launch import Launch as TritonLaunch
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, StepCost, launch_plan, size_class
from flexsn_runtime.plans._segments import ON_GPU, SegmentRule


class TritonBackend(Backend):
    name = "triton"
    target = TRITON

    @property
    def interpreted(self) -> bool:
        return triton_interpreted()

    def why_unavailable(self, device: torch.device) -> str | None:
        return why_no_triton(device)

    def why_not_in_graphs(self) -> str | None:
        return "Triton's interpreter is on, and a compiler cannot call it" if self.interpreted else None

    def why_not_together(self, device: torch.device) -> str | None:
        can_wait = torch.version.hip is None and (device.type == "cuda" or self.interpreted)
        return None if can_wait else super().why_not_together(device)

    def begin(self, device: torch.device) -> None:
        if device.type == "cuda" and not self.interpreted:
            _start_loading()

    def size_class(self, ncl: int) -> int:
        return size_class(ncl)

    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        return launch_plan(ncl, cost, interpreted=self.interpreted)

    def segments(self) -> SegmentRule | None:
        return None if self.interpreted else ON_GPU  # the interpreter runs programs one after another

    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        return TritonLaunch(kernel, sizes, config, device)

    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        if self.interpreted:
            return self.launch(kernel, sizes, config, device)
        from flexsn_codegen.targets.triton._standalone import standalone  # imports triton, which may be absent

        return TritonLaunch(replace(kernel, function=_Recorded(standalone(kernel.function))), sizes, config, device)


@functools.cache
def _start_loading() -> None:
    threading.Thread(target=_load_libraries, name="flexsn-load").start()


def _load_libraries() -> None:
    with suppress(Exception):  # the first compilation raises the error
        prepare_driver()
        why_no_nvrtc()  # loads NVRTC


class _Recorded:
    """A Triton function whose launches are recorded in the graph that is being traced."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, BLOCK: int, num_warps: int, **options: object) -> None:
            # The other options select exact arithmetic, which the standalone source already contains.
            wrap_triton(self._function)[grid](*arguments, BLOCK=BLOCK, num_warps=num_warps)

        return launch
