"""A language that kernels are written in, with all that runs them."""

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
    """A target, the sizes of its launches, what launches, where that runs, and whether it interprets.

    Nothing else in the package depends on the language of a kernel.

    Attributes:
        name: by which programs select it.
        target: the language.
        by_address: launches in a loop take addresses that are computed before the loop, and no tensors.
    """

    name: str
    target: Target
    by_address: bool = False

    @property
    def interpreted(self) -> bool:
        """Kernels run in an interpreter: there is nothing to compile."""
        return False

    # -- where it runs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def why_unavailable(self, device: torch.device) -> str | None:
        """The reason why kernels cannot run on a device, and the remedy; `None`: they can."""

    def why_not_in_graphs(self) -> str | None:
        """The reason why compiled graphs cannot have launches; `None`: they can."""
        return None

    def why_not_together(self, device: torch.device) -> str | None:
        """The reason why programs of one launch cannot wait for each other; `None`: they can."""
        return "only CUDA launches programs that wait for each other"

    # -- how it is launched ----------------------------------------------------------------------------------------

    @abstractmethod
    def size_class(self, ncl: int) -> int:
        """The largest step that is launched like one of `ncl` elements."""

    @abstractmethod
    def plan(self, ncl: int, cost: StepCost, carried: int) -> LaunchPlan:
        """The launches for a step of `ncl` elements.

        Args:
            carried: bytes per element of the states.
        """

    def segments(self) -> SegmentRule | None:
        """When kernels walk segments of time side by side; `None`: never."""
        return None

    @abstractmethod
    def launch(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Makes the launch of a kernel.

        Args:
            sizes: at least the kernel's integer arguments.
            device: of the tensors that it will be called with.
        """

    @abstractmethod
    def recorded(
        self, kernel: CompiledKernel, sizes: Mapping[str, int], config: LaunchConfig, device: torch.device
    ) -> Launch:
        """Makes a launch that records itself in the graph that is traced, instead of running: as `launch`."""
