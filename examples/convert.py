"""Converts modules in the styles of two other libraries to FlexSN, with unchanged spikes and gradients.

    python examples/convert.py [--backend auto] [--device cpu] [--steps 32] [--neurons 2000] [--seed 0]

`KeepsState` is called step by step and stores its membrane potential, as neurons in SpikingJelly do. `HandsStateOn`
takes the membrane potential as an argument and returns it, as neurons in snnTorch do. Both modules are converted in the
same way: the computation of one step from the input and the state becomes the step function, and the loop over time is
removed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexsn_nn import FlexSN, surrogate

spike = surrogate.Sigmoid(alpha=4.0)


class KeepsState(nn.Module):
    """A leaky integrate-and-fire neuron with a hard reset and one learned time constant, before the conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))
        self.v: Tensor | float = 0.0

    def reset(self) -> None:
        self.v = 0.0

    def neuronal_charge(self, x: Tensor) -> None:
        self.v = self.v + (x - self.v) * torch.sigmoid(self.w)

    def neuronal_fire(self) -> Tensor:
        assert isinstance(self.v, Tensor)
        return spike(self.v - 1.0)

    def neuronal_reset(self, fired: Tensor) -> None:
        self.v = fired * 0.0 + (1.0 - fired) * self.v

    def forward(self, x: Tensor) -> Tensor:
        self.neuronal_charge(x)
        fired = self.neuronal_fire()
        self.neuronal_reset(fired)
        return fired


class KeepsStateStep(nn.Module):
    """`KeepsState` after the conversion. `self.v` is now an argument and a result, and one method replaces three."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = v + (x - v) * torch.sigmoid(self.w)
        fired = spike(v - 1.0)
        return fired, fired * 0.0 + (1.0 - fired) * v


class HandsStateOn(nn.Module):
    """A leaky integrate-and-fire neuron with a soft reset in the next step, and one decay per neuron.

    The conversion does not change this module.
    """

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.linspace(0.5, 0.95, neurons))

    def forward(self, x: Tensor, mem: Tensor) -> tuple[Tensor, Tensor]:
        reset = spike(mem - 1.0).detach()
        mem = self.beta.clamp(0, 1) * mem + x - reset
        return spike(mem - 1.0), mem


class Run(NamedTuple):
    """Results of a run: spikes `[T, B, N]`, gradients of the input and the parameter, and the time in seconds."""

    spikes: Tensor
    grad_input: Tensor
    grad_parameter: Tensor
    seconds: float


def run(network: Callable[[Tensor], Tensor], parameter: nn.Parameter, x: Tensor, weights: Tensor) -> Run:
    x = x.clone().requires_grad_()
    start = time.perf_counter()
    spikes = network(x)
    grad_input, grad_parameter = torch.autograd.grad((spikes * weights).sum(), [x, parameter])
    # Copying the gradient waits for the GPU.
    return Run(spikes.detach(), grad_input, grad_parameter.cpu(), time.perf_counter() - start)


def compare(
    steps: int, neurons: int, seed: int, device: torch.device, backend: str = "auto"
) -> dict[str, tuple[Run, Run]]:
    """Runs each module before and after its conversion, on the same inputs."""
    torch.manual_seed(seed)
    x = 3.0 * torch.rand(steps, 4, neurons, device=device)
    weights = torch.randn(steps, 4, neurons, device=device)  # weights of the spikes in the loss

    stateful_neuron, stateful_step = KeepsState().to(device), KeepsStateStep().to(device)
    stateless_neuron = HandsStateOn(neurons).to(device)

    def run_stateful(sequence: Tensor) -> Tensor:
        stateful_neuron.reset()
        return torch.stack([stateful_neuron(step) for step in sequence.unbind()])

    def run_stateless(sequence: Tensor) -> Tensor:
        mem, spikes = torch.zeros_like(sequence[0]), []
        for step in sequence.unbind():
            fired, mem = stateless_neuron(step, mem)
            spikes.append(fired)
        return torch.stack(spikes)

    def after(core: nn.Module) -> FlexSN:
        neuron = FlexSN(core, num_inputs=1, num_states=1, num_outputs=1, backend=backend)
        neuron(x)  # the first call compiles kernels
        neuron.reset()
        return neuron

    return {
        "keeps its state": (
            run(run_stateful, stateful_neuron.w, x, weights),
            run(after(stateful_step), stateful_step.w, x, weights),
        ),
        "hands its state on": (
            run(run_stateless, stateless_neuron.beta, x, weights),
            run(after(stateless_neuron), stateless_neuron.beta, x, weights),
        ),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="convert", description="From other libraries to FlexSN.")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--neurons", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    runs = compare(settings.steps, settings.neurons, settings.seed, settings.device, settings.backend)
    for style, (before, after) in runs.items():
        different = int((before.spikes != after.spikes).sum())
        print(f"a module that {style}: {different} of {before.spikes.numel()} spikes differ")
        for name in ("grad_input", "grad_parameter"):
            a, b = getattr(before, name), getattr(after, name)
            print(f"  {name}: relative difference {float((a - b).norm() / a.norm()):.1e}")
        print(f"  {before.seconds * 1e3:.1f} ms before, {after.seconds * 1e3:.1f} ms after")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
