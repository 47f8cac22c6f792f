"""One life of a network: the network, and the results and objects that its user keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.monitor import SpikeMonitor, StateMonitor
from lives.networks import FAMILIES, Plan, build


@dataclass(eq=False)
class Graph:
    """A call whose autograd graph is kept.

    Attributes:
        results: by name, all results that may enter a loss.
        leaves: tensors that may get a gradient, except parameters.
    """

    results: dict[str, Tensor]
    leaves: list[Tensor]


@dataclass(eq=False)
class Life:
    """A network, and the results and objects that its user keeps.

    Attributes:
        compiled: True for the twin whose neurons run kernels.
        batch: batch size of inputs that fit the states.
        inputs: inputs of the last `forward`, for a repeated call.
        rounded: True after a call under autocast, because graphs of later calls may depend on that call.
    """

    plan: Plan
    compiled: bool
    net: nn.Module = field(init=False)
    batch: int = 2
    dtype: torch.dtype = torch.float32
    step_mode: str = "m"
    optimizer: torch.optim.Optimizer | None = None
    graphs: list[Graph] = field(default_factory=list)
    inputs: Tensor | None = None
    rounded: bool = False
    monitors: list[SpikeMonitor | StateMonitor] = field(default_factory=list)
    saved: dict[str, Tensor] | None = None
    saved_states: dict[str, list[Tensor]] | None = None
    handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.net = build(self.plan)
        self.set_backends(self.net)

    @property
    def backend(self) -> str:
        """Backend of the neurons of this twin."""
        return self.plan.backend if self.compiled else "torch"

    def set_backends(self, net: nn.Module) -> None:
        """Sets the backend of all neurons to the backend of this life. Neurons in step mode `"s"` refuse `"triton"`, so
        their backend is then set to `"auto"`.
        """
        for module in net.modules():
            if isinstance(module, FlexSN):
                is_refused = self.backend == "triton" and module.step_mode == "s"
                module.backend = "auto" if is_refused else self.backend

    @property
    def neurons(self) -> list[FlexSN]:
        """All neurons, except neurons inside the step of another neuron."""
        from flexsn_nn.functional import neurons

        return [neuron for _, neuron in neurons(self.net)]

    def neuron(self, which: int) -> FlexSN | None:
        """Returns one of the neurons, or `None` if the network has no neurons."""
        candidates = self.neurons
        return candidates[which % len(candidates)] if candidates else None

    def parameter(self, which: int) -> tuple[nn.Module, str, nn.Parameter] | None:
        """Returns the module, the name and the value of one of the parameters, or `None` if there are no parameters."""
        candidates = [(m, n, p) for m in self.net.modules() for n, p in m._parameters.items() if p is not None]
        return candidates[which % len(candidates)] if candidates else None

    def matrix(self, which: int) -> nn.Module | None:
        """Returns a linear layer or a convolution, whose `weight` can be pruned or parametrised, or `None`."""
        candidates = [
            m for m in self.net.modules() if isinstance(m, nn.Linear | nn.Conv2d) and isinstance(m.weight, Tensor)
        ]
        return candidates[which % len(candidates)] if candidates else None

    def sequence(self, steps: int, seed: int, layout: str = "contiguous", batch: int | None = None) -> Tensor:
        """Makes an input `[steps, batch, *]` with values on a grid, in one of several memory layouts."""
        shape = (steps, batch or self.batch, *FAMILIES[self.plan.family])
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            integers = torch.randint(-4, 20, shape, generator=generator)
            return (integers / 8).to(self.dtype).to(self.plan.device)

        if layout == "batch first":
            x = values(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        elif layout == "channels last":
            x = values(*shape[:2], *shape[3:], shape[2]).movedim(-1, 2)
        elif layout == "sliced":
            x = values(2 * shape[0], *shape[1:])[::2]
        elif layout == "offset":
            x = values(shape[0] + 1, *shape[1:])[1:]
        elif layout == "same in all steps":
            x = values(*shape[1:]).expand(shape)
        elif layout == "same in the batch":
            x = values(shape[0], 1, *shape[2:]).expand(shape)
        else:
            x = values(*shape)
        return x

    def drop_graphs(self) -> None:
        """Drops all graphs."""
        self.graphs.clear()


LAYOUTS = (
    "contiguous",
    "contiguous",
    "batch first",
    "channels last",
    "sliced",
    "offset",
    "same in all steps",
    "same in the batch",
)
