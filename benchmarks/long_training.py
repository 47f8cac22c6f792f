"""Seconds per epoch of examples/long_sequence.py, which trains on long sequences, for each way to run the neurons.

    python benchmarks/long_training.py [--output FILE] [--device cuda] [--batches 8] [--rounds 3]

`serial` means kernels without segments of time. On a GPU, kernels with and without segments are measured in eager calls
and as captured steps (`flexsn_nn.graphs.capture`), which Python does not slow down. A batch in the loop or in snnTorch
takes as long as thousands of batches in kernels. Therefore, the loop and snnTorch only run one batch of at most 2,000
steps, and its time is extrapolated to all steps and batches. The table marks extrapolated figures. The table is written
after each measurement. On the CPU, seconds are CPU time of the process with one thread, so that waiting for other
processes does not count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import describe_machine, publish, synchronize, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexsn_nn import FlexSN
from flexsn_nn.graphs import capture
from flexsn_runtime.plans._segments import using_segments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
example: Any = importlib.import_module("long_sequence")

# Number of batches before the measurement, in which kernels are compiled, warm-ups chosen and steps captured.
WARM = 16
STEPS = 2000  # largest number of steps in a batch of the loop and of snnTorch

Step = Callable[[Tensor, Tensor], object]


class Leaky(nn.Module):
    """snnTorch's neuron in a loop over time. It maps `[T, B, H]` to spikes."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        snntorch = importlib.import_module("snntorch")
        decay = 1.0 - torch.sigmoid(next(hidden.parameters()).detach())
        surrogate = snntorch.surrogate.atan()
        self.leaky = snntorch.Leaky(decay, learn_beta=True, spike_grad=surrogate, reset_mechanism="zero")

    def forward(self, currents: Tensor) -> Tensor:
        membrane = self.leaky.init_leaky()
        spikes = []
        for current in currents:
            spike, membrane = self.leaky(current, membrane)
            spikes.append(spike)
        return torch.stack(spikes)


class Way(NamedTuple):
    """One way to run the neurons.

    Attributes:
        make: function that makes a network for a number of classes.
        rule: function that returns a context, in which a rule of segments applies.
        is_loop: True if the neurons run in a loop over time, so that their time is extrapolated.
        is_captured: True if training steps are CUDA graphs.
    """

    make: Callable[[int], nn.Module]
    rule: Callable[[], AbstractContextManager[None]] = nullcontext
    is_loop: bool = False
    is_captured: bool = False


def make_ours(backend: str) -> Callable[[int], nn.Module]:
    def make(classes: int) -> nn.Module:
        network: nn.Module = example.Network(classes, backend)
        return network

    return make


def make_peer(classes: int) -> nn.Module:
    network: nn.Module = example.Network(classes, neuron=Leaky(example.Network(classes).hidden))
    return network


def make_training_step(network: nn.Module, way: Way) -> Step:
    if not way.is_captured:
        optimizer = example.optimizer_of(network)
        return lambda x, y: example.train_step(network, optimizer, x, y)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2, capturable=True)
    captured: Step = capture(network, cross_entropy, adam)
    return captured


def measure_epoch(step: Step, data: Any, rounds: int) -> float:
    """Returns the seconds of an epoch, as the minimum over `rounds` rounds."""
    device = data.train_x.device
    # All batches have the same size, so that one graph is enough. The last batch therefore overlaps the previous batch.
    starts = [min(i, len(data.train_x) - example.BATCH) for i in range(0, len(data.train_x), example.BATCH)]
    batches = [(data.train_x[i : i + example.BATCH], data.train_y[i : i + example.BATCH]) for i in starts]
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(WARM):
        step(*batches[0])
        synchronize(device)  # makes the counts of recomputed elements available, which the next call reads
    seconds = []
    for _ in range(rounds):
        begun = clock()
        for batch in batches:
            step(*batch)
        synchronize(device)
        seconds.append(clock() - begun)
    return min(seconds)


def extrapolate_epoch(step: Step, data: Any) -> float:
    """Returns the seconds of an epoch, extrapolated from one batch of at most `STEPS` steps."""
    device, (samples, steps) = data.train_x.device, data.train_x.shape
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    x, y = data.train_x[: example.BATCH], data.train_y[: example.BATCH]
    step(x[:, :64], y)
    synchronize(device)
    begun = clock()
    step(x[:, :STEPS], y)
    synchronize(device)
    seconds = clock() - begun
    return float(seconds * max(steps / STEPS, 1.0) * -(-samples // example.BATCH))


def list_ways(device: torch.device) -> dict[str, Way]:
    kernels = make_ours("triton" if device.type == "cuda" else "cpp")

    def serial() -> AbstractContextManager[None]:
        return using_segments(None)

    ways_by_name = {"kernels": Way(kernels), "serial": Way(kernels, serial)}
    if device.type == "cuda":
        ways_by_name["captured"] = Way(kernels, is_captured=True)
        ways_by_name["captured, serial"] = Way(kernels, serial, is_captured=True)
    ways_by_name["loop"] = Way(make_ours("torch"), is_loop=True)
    if importlib.util.find_spec("snntorch") is not None:
        ways_by_name["snnTorch"] = Way(make_peer, is_loop=True)
    return ways_by_name


def describe_segments(network: nn.Module) -> str:
    """Returns the parts of `explain()` that describe segments, or `"none"`."""
    hidden = network.hidden
    assert isinstance(hidden, FlexSN)
    lines = hidden.explain().splitlines()
    return "; ".join(line.split(": ", 1)[1] for line in lines if "side by side" in line) or "none"


def measure(way: Way, data: Any, rounds: int) -> tuple[str, str]:
    """Returns the seconds of an epoch, and the description of the segments."""
    torch.manual_seed(0)
    with way.rule():
        network = way.make(data.classes).to(data.train_x.device)
        step = make_training_step(network, way)
        if way.is_loop:
            return f"~{extrapolate_epoch(step, data):.3g}", "none"
        seconds = f"{measure_epoch(step, data, rounds):.3g}"
        if way.is_captured:
            print(step.explain())  # type: ignore[attr-defined]
        return seconds, describe_segments(network)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, default=8, help="number of batches per epoch of raw audio")
    parser.add_argument("--rounds", type=int, default=3, help="number of epochs, of which the fastest counts")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    output = options.output or results / f"long_training{'' if device.type == 'cuda' else '_cpu'}.md"
    tasks = {
        "pixel by pixel": example.pixels(2000, 0).to(device),
        "raw audio": example.waves(options.batches * example.BATCH, example.RATE, 0).to(device),
    }
    ways_by_name = list_ways(device)
    cells: dict[tuple[str, str], str] = {}
    segments = dict.fromkeys(tasks, "")
    lines = [
        "# Training on long sequences",
        "",
        f"`python benchmarks/long_training.py --device {device.type}`: seconds per epoch of",
        f"examples/long_sequence.py, with {example.BATCH} sequences per batch and {example.HIDDEN} neurons, as the "
        f"minimum of {options.rounds} epochs.",
        "`serial`: kernels that process all steps one after another."
        + (
            " `captured`: training steps in CUDA graphs. All other ways run in eager mode."
            if "captured" in ways_by_name
            else ""
        ),
        f"`~`: one batch of at most {STEPS} steps was measured and extrapolated to all steps and batches."
        + (" Seconds are the CPU time of one thread." if device.type == "cpu" else "")
        + ("" if "snnTorch" in ways_by_name else " snnTorch was not installed."),
        describe_machine(device),
        "",
    ]
    for name, way in ways_by_name.items():
        for task, data in tasks.items():
            cells[task, name], description = measure(way, data, options.rounds)
            print(task, name, cells[task, name], description, flush=True)
            if name == "kernels":
                segments[task] = description
        rows = [
            [
                *(task, data.train_x.shape[1], len(data.train_x)),
                *(cells.get((task, name), "") for name in ways_by_name),
                segments[task],
            ]
            for task, data in tasks.items()
        ]
        publish([*lines, *table(["task", "steps", "sequences", *ways_by_name, "segments"], rows)], output)


if __name__ == "__main__":
    main()
