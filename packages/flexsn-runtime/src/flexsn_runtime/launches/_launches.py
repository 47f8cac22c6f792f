"""Interfaces of all launches, whatever the language of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig


class Launch(Protocol):
    """Runs a kernel over one number of elements and steps, any number of times."""

    @property
    def is_compiled(self) -> bool:
        """True if everything is compiled."""

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Returns a function that allocates a new tensor for the kernel to write, in each call."""

    def entry(self) -> Entry | None:
        """The data of a launch by address, without Python; `None` if it has none, or none yet."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles for tensors with these dtypes and alignments, without launching."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches; `tensors` are in the order of the kernel's parameters."""


class LaunchByAddress(Launch, Protocol):
    """A launch of a backend that launches `by_address`."""

    def at(self, example: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """Returns a function that launches for one of several sets of tensors, by its index.

        Args:
            example: one of the sets.
            addresses: addresses of all sets.
        """


def launch(kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device) -> Launch:
    """The launch of a kernel: run, or recorded in a graph, as its step selects.

    Args:
        sizes: at least the kernel's integer arguments.
        device: device of the tensors in its calls.
    """
    assert kernel.launched_by is not None
    made: Launch = kernel.launched_by(kernel, sizes, config, device)
    return made
