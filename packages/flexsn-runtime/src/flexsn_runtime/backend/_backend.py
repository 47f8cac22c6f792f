"""Base class of the backends: a kernel language, and everything that runs kernels in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from flexsn_codegen import Target
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launches import Launch
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, StepCost
from flexsn_runtime.plans._segments import SegmentRule


class Backend(ABC):
    """A target, with its launch sizes, its launches, the devices that it runs on, and its interpreter, if any.

    No other part of the package depends on the language of a kernel.

    Attributes:
        name: name by which programs select the backend.
        target: the language.
        by_address: True if launches in a loop receive addresses, computed before the loop, instead of tensors.
    """

    name: str
    target: Target
    by_address: bool = False

    @property
    def interpreted(self) -> bool:
        """True if kernels run in an interpreter, so that nothing is compiled."""
        return False

    # -- devices ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def why_unavailable(self, device: torch.device) -> str | None:
        """The reason why kernels cannot run on a device, with a remedy; `None` if they can."""

    def why_not_in_graphs(self) -> str | None:
        """The reason why compiled graphs cannot contain launches; `None` if they can."""
        return None

    def why_not_together(self, device: torch.device) -> str | None:
        """The reason why programs of one launch cannot wait for each other; `None` if they can."""
        return "only CUDA launches programs that wait for each other"

    def begin(self, device: torch.device) -> None:  # noqa: B027
        """Loads libraries for the first launch on a device, in another thread."""

    # -- launches --------------------------------------------------------------------------------------------------

    @abstractmethod
    def size_class(self, ncl: int) -> int:
        """The maximum number of elements per step in the size class that contains `ncl`."""

    @abstractmethod
    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        """The launch plan for a step of `ncl` elements.

        Args:
            carried: bytes per element of the states.
        """

    def segments(self) -> SegmentRule | None:
        """The rule that decides when kernels process segments of time in parallel; `None` if they never do."""
        return None

    @abstractmethod
    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Prepares the launch of a kernel.

        Args:
            sizes: sizes by name, including all integer arguments of the kernel.
            device: device of the tensors that its calls receive.
        """

    @abstractmethod
    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Like `launch`, but a call records the launch in the graph that is being traced, instead of running it."""
