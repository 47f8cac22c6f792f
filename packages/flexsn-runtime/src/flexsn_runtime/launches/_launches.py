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
        """True if a launch no longer needs to compile the kernel."""

    def allocator(
        self, shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Returns a function that allocates a tensor with this layout, to which the kernel can write."""

    def entry(self) -> Entry | None:
        """Returns the data for a launch by address, without Python.

        Returns `None` if the backend provides no such data, or before the data is available.
        """

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Compiles the kernel for the dtypes and alignments of these tensors, without launching it."""

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches the kernel on tensors in the order of its parameters."""


class LaunchByAddress(Launch, Protocol):
    """A launch by a backend whose attribute `by_address` is True."""

    def at(self, example: Sequence[Tensor], addresses: Sequence[Sequence[int]]) -> Callable[[int], None]:
        """Returns a function that takes an index, and launches the kernel on the set of tensors with this index.

        Args:
            example: one set of tensors.
            addresses: the addresses of the tensors of each set.
        """


def launch(kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device) -> Launch:
    """Returns the launch of a kernel. Calls run the kernel, or record its launch in a graph that is being traced.

    Args:
        sizes: sizes by name, including all integer arguments of the kernel.
        device: device of the tensors that each call receives.
    """
    assert kernel.launched_by is not None
    prepared: Launch = kernel.launched_by(kernel, sizes, config, device)
    return prepared
