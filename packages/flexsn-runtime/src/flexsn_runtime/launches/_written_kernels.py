"""Launches handwritten kernels of `flexsn_codegen.targets.triton.device`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry, watching
from flexsn_codegen.targets.triton import entry, interpreting, launcher, on_device, prepare_compiler
from flexsn_codegen.targets.triton._launcher import load
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._recent import Recent
from flexsn_runtime.launches._launch import allocator


class PreparedKernel:
    """A handwritten kernel with its numeric arguments.

    After the first call, a launch skips Triton's search for the binary.

    Args:
        function: a `triton.jit` function of `(*tensors, *numbers)`.
        grid: grid of its programs.
        numbers: arguments of the kernel after the tensors; the constants are last.
        device: device of the tensors.
        fused: True if a product and a sum may be fused into one operation, which is rounded once.
    """

    __slots__ = ("_device", "_entry", "_function", "_grid", "_numbers", "_options", "_relaunch")

    allocator = staticmethod(allocator)

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        device: torch.device,
        num_warps: int = 4,
        stages: int = 1,
        *,
        fused: bool = True,
    ) -> None:
        self._function, self._grid, self._numbers, self._device = function, grid, numbers, device
        # All options are passed explicitly, because the defaults differ between versions of Triton.
        self._options = {"num_warps": num_warps, "num_stages": stages, "enable_fp_fusion": fused}
        self._relaunch: Callable[[Sequence[Tensor]], None] | None = None
        self._entry: Entry | None = None

    @property
    def is_compiled(self) -> bool:
        return self._relaunch is not None or triton_interpreted()

    def entry(self) -> Entry | None:
        """Returns the data for a launch by address; `None` before the first launch, or if Triton provides no data."""
        return self._entry

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles the kernel for the dtypes and alignments of these tensors, without launching it."""
        prepare_compiler()
        with on_device(self._device):
            load(self._function.warmup(*tensors, *self._numbers, grid=self._grid, **self._options))

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel on tensors with the dtypes and alignments of the first call."""
        if self._relaunch is not None:
            self._relaunch(tensors)
            return
        if triton_interpreted():
            with interpreting():
                self._function[self._grid](*tensors, *self._numbers)
            return
        with on_device(self._device):
            compiled = self._function[self._grid](*tensors, *self._numbers, **self._options)
        if compiled is not None:
            x, y, z = (*self._grid, 1, 1)[:3]
            self._relaunch = launcher(compiled, (x, y, z), self._numbers, self._device)
            self._entry = entry(compiled, (x, y, z), self._numbers)


_kernel_by_key: Recent[PreparedKernel] = Recent()


def prepared(key: Hashable, make: Callable[[], PreparedKernel]) -> PreparedKernel:
    """Returns the kernel that `make` returned for a key. Calls `make` only if the key is new.

    The key must contain everything on which the kernel and its launch depend.
    """
    kernel = _kernel_by_key.get(key)
    if kernel is None:
        kernel = _kernel_by_key[key] = make()
    return kernel


def run_kernel(
    function: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    stages: int = 1,
    *,
    fused: bool = True,
) -> None:
    """Launches a handwritten kernel.

    If an earlier launch had the same arguments, dtypes and alignments, the launch skips Triton's search for the binary.

    Args:
        function: a `triton.jit` function of `(*tensors, *numbers, *constants)`.
        fused: True if a product and a sum may be fused into one operation, which is rounded once.
    """
    device = tensors[0].device
    tensor_keys = [(t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    key = (function, device, grid, numbers, constants, num_warps, stages, fused, *tensor_keys)

    def make() -> PreparedKernel:
        return PreparedKernel(function, grid, (*numbers, *constants), device, num_warps, stages, fused=fused)

    kernel = prepared(key, make)
    kernel(tensors)
    if watching.by is not None:
        watching.by(kernel, (tensors,), kernel.entry())
