"""LIF neurons of other libraries, as activations of a network."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn


def is_installed(library: str) -> bool:
    """Returns True if the library is installed."""
    return importlib.util.find_spec(library) is not None


def make_spikingjelly_lif() -> nn.Module:
    """Returns the neuron of the installed SpikingJelly 2, which uses its Triton kernels on a GPU."""
    node: nn.Module = importlib.import_module("spikingjelly.activation_based.neuron").LIFNode(tau=2.0, step_mode="m")
    return node


def make_spikingjelly_loop() -> nn.Module:
    """Returns SpikingJelly's LIF neuron as a loop over PyTorch operators, as SpikingJelly runs custom neurons."""
    base = importlib.import_module("spikingjelly.activation_based.base").MemoryModule
    node = importlib.import_module("spikingjelly.activation_based.neuron").LIFNode

    class LoopedLIFNode(node):  # type: ignore[misc, valid-type]
        multi_step_functional_forward = base.multi_step_functional_forward

    neuron: nn.Module = LoopedLIFNode(tau=2.0, step_mode="m")
    return neuron


def make_spikingjelly_graph(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns SpikingJelly's `StaticCudaGraph` of a function of two tensors. On a GPU, it captures the fourth call."""
    graph: Callable[[Tensor, Tensor], Tensor] = importlib.import_module(
        "spikingjelly.activation_based._cuda_graph"
    ).StaticCudaGraph(step)
    return graph


class SnnTorchLeaky(nn.Module):
    """snnTorch's `Leaky` in a loop over time. It maps `[T, B, ...]` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.leaky: nn.Module = importlib.import_module("snntorch").Leaky(beta=0.5)

    def forward(self, x: Tensor) -> Tensor:
        spikes, membrane = [], self.leaky.reset_mem()  # type: ignore[operator]
        for frame in x:
            spike, membrane = self.leaky(frame, membrane)
            spikes.append(spike)
        return torch.stack(spikes)


def list_resets(net: nn.Module) -> list[Callable[[], object]]:
    """Returns functions that reset the neurons of other libraries in a network."""
    reset_methods: list[Callable[[], object]] = []
    for module in net.modules():
        # The class of a module may derive from a class of the library, so the base classes are searched, too.
        is_spikingjelly = any(kind.__module__.startswith("spikingjelly") for kind in type(module).__mro__)
        if is_spikingjelly and hasattr(module, "reset"):
            reset_methods.append(module.reset)  # type: ignore[arg-type]
    return reset_methods
