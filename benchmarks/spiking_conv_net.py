"""Times of training steps of a small convolutional network with LIF layers, for each backend, and the neurons' share.

    python benchmarks/spiking_conv_net.py [--output benchmarks/results/spiking_conv_net.md] [--batch 32] [--steps 16]

The network has three blocks of convolution, batch norm, LIF and pooling, and a linear readout of the firing rates. Its
input is an image of 3 x 32 x 32, which is repeated for T steps. A training step is a forward, cross entropy, and a
backward. A path is a backend, with or without `torch.compile`. The time of the neurons is the time of a step minus the
time of the same network on the same path with `nn.Identity` instead of neurons.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, milliseconds, publish, table
from torch import Tensor, nn

from flexsn_nn import LIF, OverTime
from flexsn_nn.functional import reset_net

CLASSES = 10
# The backend of the neurons, and True if torch.compile(fullgraph=True) compiles the network.
PATHS = (("torch", False), ("hop", False), ("triton", False), ("hop", True), ("triton", True))


class Network(nn.Module):
    """A network that maps `[T, B, 3, 32, 32]` to `[B, 10]`."""

    def __init__(self, width: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)
        blocks = []
        for before, after in itertools.pairwise(channels):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            blocks += [OverTime(convolution, nn.BatchNorm2d(after)), neuron(), OverTime(nn.AvgPool2d(2))]
        self.blocks = nn.Sequential(*blocks)
        self.readout = nn.Linear(4 * width * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        reset_net(self)
        rates: Tensor = self.readout(self.blocks(x).flatten(2)).mean(0)
        return rates


def make_training_step(network: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], object]:
    parameters = list(network.parameters())

    def run() -> object:
        return torch.autograd.grad(nn.functional.cross_entropy(network(x), labels), parameters)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "spiking_conv_net.md")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="number of channels of the first block")
    parser.add_argument("--device", default="cuda", help="cpu, with TRITON_INTERPRET=1, to test this script")
    options = parser.parse_args()
    device = torch.device(options.device)
    image = torch.rand(options.batch, 3, 32, 32, device=device)
    x = image.expand(options.steps, *image.shape)
    labels = torch.randint(CLASSES, (options.batch,), device=device)

    def measure(neuron: Callable[[], nn.Module], compiled: bool) -> tuple[float, float]:
        """Returns the time of the first training step in s, and the median time of later steps in ms."""
        torch.manual_seed(0)
        network: nn.Module = Network(options.width, neuron).to(device)
        if compiled:
            network = torch.compile(network, fullgraph=True)  # type: ignore[assignment]
        step = make_training_step(network, x, labels)
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - begun
        return first, milliseconds(step, device, warmup=50, rep=300)

    measure(nn.Identity, False)  # initialises the libraries
    ms_without_neurons = {compiled: measure(nn.Identity, compiled)[1] for compiled in (False, True)}
    rows, loop = [], 0.0
    for backend, compiled in PATHS:
        name = f'`backend="{backend}"`' + (" in `torch.compile`" if compiled else "")
        try:
            first, ms = measure(functools.partial(LIF, backend=backend), compiled)
        except RuntimeError as error:  # all other paths are still measured
            rows.append((name, *["-"] * 5, f"failed: {str(error).splitlines()[0]}"))
            continue
        loop = loop or ms  # the time of the first path
        neuron_ms = ms - ms_without_neurons[compiled]
        cells = (f"{ms:.2f}", f"{ms_without_neurons[compiled]:.2f}", f"{neuron_ms:.2f}", f"{neuron_ms / ms:.0%}")
        rows.append((name, *cells, f"{loop / ms:.1f}", f"{first:.1f}"))
    header = ("path", "step", "without neurons", "neurons", "share", "loop / step", "first step, s")
    lines = [
        f"# Spiking convolutional network, T = {options.steps}, batch {options.batch}, float32",
        "",
        "`python benchmarks/spiking_conv_net.py`: a training step of three blocks of convolution, batch norm, LIF and",
        f"pooling ({options.width}, {2 * options.width}, {4 * options.width} channels); medians in ms, in one run.",
        "`neurons` is the time of the step minus the time with `nn.Identity` instead of neurons. `torch.compile` runs",
        'with `fullgraph=True`. Without `torch.compile`, `backend="hop"` runs the same loop as `backend="torch"`.',
        describe_machine(device),
        "",
        *table(header, rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
