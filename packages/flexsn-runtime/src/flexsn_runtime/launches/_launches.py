"""Interfaces that the launches of all kernel languages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.plans._buckets import LaunchConfig


class Launch(Protocol):
    """Runs a kernel over a fixed number of elements and steps, any number of times."""

    @property
    def is_compiled(self) -> bool:
        """True if everything is compiled."""

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Returns a function that each call uses to allocate a tensor that the kernel writes."""

    def entry(self) -> Entry | None:
        """The data for a launch by address, without Python; `None` if no data exists, or if it is not available yet."""

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles the kernel for tensors with these dtypes and alignments, without launching it."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel on tensors in the order of its parameters."""


class LaunchByAddress(Launch, Protocol):
    """A launch by a backend whose attribute `by_address` is True."""

    def at(self, example: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """Returns a function that takes an index, and launches the kernel on the set of tensors with this index.

        Args:
            example: one of the sets.
            addresses: addresses of all sets.
        """


def launch(kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device) -> Launch:
    """Returns the launch of a kernel. Depending on the step, a call runs it, or records it in a graph.

    Args:
        sizes: sizes by name, including all integer arguments of the kernel.
        device: device of the tensors that its calls receive.
    """
    assert kernel.launched_by is not None
    made: Launch = kernel.launched_by(kernel, sizes, config, device)
    return made
