"""Interfaces of every launch, whatever its kernel is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig


class Launch(Protocol):
    """Runs a kernel over one number of elements and steps, as often as it is called."""

    @property
    def is_compiled(self) -> bool:
        """True if nothing is left to compile."""

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Returns a function that allocates a tensor that the kernel writes, a new one in each call."""

    def entry(self) -> Entry | None:
        """How it is launched by its address, without Python; `None`: it cannot be, or not yet."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles for tensors like these in dtype and alignment, without launching."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches; `tensors` are in the order of the kernel's parameters."""


class LaunchByAddress(Launch, Protocol):
    """A launch of a backend that launches `by_address`."""

    def at(self, example: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """Returns a function that launches for one of several sets of tensors, by its number.

        Args:
            example: one of the sets.
            addresses: of all of them.
        """


def launch(kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device) -> Launch:
    """The launch of a kernel: run, or recorded in a graph, as its step has it.

    Args:
        sizes: at least the kernel's integer arguments.
        device: of the tensors that it will be called with.
    """
    assert kernel.launched_by is not None
    made: Launch = kernel.launched_by(kernel, sizes, config, device)
    return made
