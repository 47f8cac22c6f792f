"""Whole networks on the CPU, compared with the same networks with ReLU: the cost of the neurons in a training step.

    python benchmarks/cpu_networks.py [--output benchmarks/results/cpu_networks.md] [--threads 1] [--only digits]

A step is a forward, cross entropy of the mean over time, a backward, and SGD. The network with ReLU instead of neurons,
on the same T·B frames, is the lower limit: a network whose neurons cost nothing would take the same time. The steps of
the networks alternate, and a figure is the median over steps. The sizes come from examples/digits.py, from the pages on
images and audio in the documentation, and from a small convolutional network.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_neurons import Run, measure_medians
from measure import describe_machine, publish, table
from networks import Activation, make_feed_forward, make_vgg8
from torch import nn

from flexsn_nn import LIF
from flexsn_nn.functional import reset_net


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and its input `[T, B, ...]`."""

    name: str
    make: Callable[[Activation], nn.Module]
    shape: tuple[int, ...]
    classes: int


def _make_dense(*sizes: int) -> Callable[[Activation], nn.Module]:
    return lambda activation: make_feed_forward(activation, *sizes)


CASES = (
    Case("digits: 64-128-10, T 16, B 64", _make_dense(64, 128, 10), (16, 64, 64), 10),
    Case("images: 784-1000-10, T 25, B 128", _make_dense(784, 1000, 10), (25, 128, 784), 10),
    Case("audio: 700-256-256-20, T 100, B 64", _make_dense(700, 256, 256, 20), (100, 64, 700), 20),
    Case("VGG-8, T 4, B 4, 32²", make_vgg8, (4, 4, 3, 32, 32), 10),
)
NEURONS: dict[str, Activation] = {
    "ReLU": nn.ReLU,
    "LIF": lambda: LIF(backend="cpp"),
    "LIF, the loop": lambda: LIF(backend="torch"),
}


def make_training_step(case: Case, activation: Activation) -> Run:
    torch.manual_seed(0)
    network = case.make(activation)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    x, target = torch.rand(case.shape), torch.randint(case.classes, (case.shape[1],))

    def step() -> None:
        reset_net(network)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x).mean(0), target).backward()
        optimizer.step()

    return step


def main(path: Path, threads: int, only: str, seconds: float) -> None:
    torch.set_num_threads(threads)
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        ms = measure_medians(
            {name: make_training_step(case, activation) for name, activation in NEURONS.items()}, seconds
        )
        ours, loop, limit = ms["LIF"], ms["LIF, the loop"], ms["ReLU"]
        costs = (f"{ours / limit:.2f}", f"{loop / limit:.2f}")
        rows.append((case.name, f"{limit:.1f}", f"{ours:.1f}", f"{loop:.1f}", *costs))
    head = ("network", "ReLU, ms", "LIF, ms", "LIF as a loop, ms", "LIF / ReLU", "loop / ReLU")
    lines = [
        "# Whole networks on the CPU, compared with ReLU",
        "",
        f"`python benchmarks/cpu_networks.py --threads {threads}`: median time of a training step.",
        f"{describe_machine(torch.device('cpu'))} float32. Threads: {threads} of {os.cpu_count()} processors; load",
        f"{os.getloadavg()[0]:.1f} at the end.",
        "",
        *table(head, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_networks.md")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1.5, help="time per figure")
    arguments = parser.parse_args()
    main(arguments.output, arguments.threads, arguments.only, arguments.seconds)
