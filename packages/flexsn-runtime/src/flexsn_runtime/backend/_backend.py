"""Base class of the backends. A backend compiles and launches the kernels of one language."""

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
    """A target together with its launch plans, its launches and the devices that its kernels run on.

    Code outside of the backends does not depend on the language of a kernel.

    Attributes:
        name: name by which programs select the backend.
        target: the language.
        by_address: True if launches in a loop receive addresses instead of tensors. The addresses are computed before
            the loop.
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
        """Returns the reason why kernels cannot run on a device, with a remedy; `None` if kernels can run."""

    def why_not_in_graphs(self) -> str | None:
        """Returns the reason why compiled graphs cannot contain launches; `None` if graphs can contain launches."""
        return None

    def why_not_together(self, device: torch.device) -> str | None:
        """Returns the reason why programs of one launch cannot wait for each other; `None` if the programs can wait."""
        return "only CUDA launches programs that wait for each other"

    def begin(self, device: torch.device) -> None:  # noqa: B027
        """Prepares the first launch on a device, such as by starting to load libraries. By default, does nothing."""

    # -- launches --------------------------------------------------------------------------------------------------

    @abstractmethod
    def size_class(self, ncl: int) -> int:
        """Returns the maximum number of elements per step in the size class that contains `ncl`."""

    @abstractmethod
    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        """Returns the launch plan for a step of `ncl` elements.

        Args:
            carried: bytes per element of the states.
        """

    def segments(self) -> SegmentRule | None:
        """Returns the rule for parallel segments of time; `None` if this backend never runs segments in parallel."""
        return None

    @abstractmethod
    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Returns the launch of a kernel, prepared for these sizes.

        Args:
            sizes: sizes by name, including all integer arguments of the kernel.
            device: device of the tensors that each call of the launch receives.
        """

    @abstractmethod
    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Returns a launch like `launch`, whose calls record a launch in the graph that is being traced."""
