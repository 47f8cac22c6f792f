"""Kernels of products with spikes, each prepared for operands of one layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen.targets.triton import interpreting, launcher, on_device
from flexsn_runtime._availability import triton_interpreted
from flexsn_runtime._recent import Recent

_prepared: Recent[PreparedKernel] = Recent()


class PreparedKernel:
    """A kernel with its numbers. Called again, it is launched without Triton's search for the binary.

    Args:
        name: of the kernel.
        grid: of its programs.
        numbers: its arguments after the tensors, constants last.
        device: of the tensors.
    """

    __slots__ = ("_again", "_device", "_function", "_grid", "_numbers", "_options")

    def __init__(
        self,
        name: str,
        grid: tuple[int, ...],
        numbers: tuple[int, ...],
        device: torch.device,
        num_warps: int = 4,
        stages: int = 1,
    ) -> None:
        self._function = getattr(device_module(), name)
        self._grid, self._numbers, self._device = grid, numbers, device
        self._options = {"num_warps": num_warps, "num_stages": stages}
        self._again: Callable[[Sequence[Tensor]], None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launches it over tensors whose dtypes and alignments are those of the first call."""
        if self._again is not None:
            self._again(tensors)
            return
        if triton_interpreted():
            with interpreting():
                self._function[self._grid](*tensors, *self._numbers)
            return
        with on_device(self._device):
            compiled = self._function[self._grid](*tensors, *self._numbers, **self._options)
        if compiled is not None:
            x, y, z = (*self._grid, 1, 1)[:3]
            self._again = launcher(compiled, (x, y, z), self._numbers, self._device)


def prepared(key: Hashable, make: Callable[[], PreparedKernel]) -> PreparedKernel:
    """The kernel that `make` returned for a key."""
    kernel = _prepared.get(key)
    if kernel is None:
        kernel = _prepared[key] = make()
    return kernel


@functools.cache
def device_module() -> Any:
    """The module of kernels, which imports Triton."""
    from flexsn_codegen.targets.triton.device import _products

    return _products
