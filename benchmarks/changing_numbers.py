"""Resources that a neuron needs if a number in its core changes between calls: kernels, time, memory, modules, files.

    python benchmarks/changing_numbers.py [--output benchmarks/results/changing_numbers.md] [--values 10000]

A neuron with compiled kernels is called once for each value (in Triton's interpreter if there is no GPU). The table
has three kinds of cases: the threshold of the neuron is annealed, the width of its surrogate is annealed during
training, or a number selects the branches of the core, so that each call takes other branches. Resources are counted
after the first tenth of the values and at the end. Resources that grow between the two counts would grow forever.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from many_neurons import Held
from measure import describe_machine, publish, table
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.surrogate import Sigmoid
from flexsn_runtime import triton_interpreted

BRANCHES = 12  # number of branches, which have 2**BRANCHES outcomes together


class Annealed(nn.Module):
    """A leaky integrator with numbers that a schedule can change."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = 1.0
        self.surrogate = Sigmoid(4.0)
        self.bits = 0

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * math.exp(-self.threshold) + x
        for bit in range(self.bits.bit_length()):
            h = h + x if self.bits >> bit & 1 else h - v
        s = self.surrogate(h - self.threshold)
        return s, h * (1.0 - s)


def anneal_threshold(core: Annealed, value: int, values: int) -> None:
    core.threshold = 1.0 + value / values


def anneal_width(core: Annealed, value: int, values: int) -> None:
    core.surrogate = Sigmoid(4.0 + value / values)


def choose_branches(core: Annealed, value: int, values: int) -> None:
    core.bits = 2**BRANCHES + value


Change = Callable[[Annealed, int, int], None]
# By name: the change, True if gradients are computed, and the fraction of `--values` that is used.
CASES: dict[str, tuple[Change, bool, float]] = {
    "threshold": (anneal_threshold, False, 1.0),
    "threshold, trained": (anneal_threshold, True, 0.05),
    "surrogate's width, trained": (anneal_width, True, 0.05),
    "branches": (choose_branches, False, 0.15),
}


def run(core: Annealed, neuron: FlexSN, change: Change, values: range, trained: bool) -> None:
    """Changes a number of the core to each of the values, and calls the neuron once after each change."""
    x = torch.ones(2, 8, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=trained)
    for value in values:
        change(core, value, 10_000)
        neuron.reset()
        output = neuron(x)
        assert isinstance(output, Tensor)
        if trained:
            output.sum().backward()


def main(path: Path, values: int) -> None:
    rows = []
    for name, (change, trained, fraction) in CASES.items():
        count = int(values * fraction)
        with tempfile.TemporaryDirectory() as folder:  # a cache that contains no kernels of other cases
            os.environ["FLEXSN_CACHE_DIR"] = folder
            core = Annealed()
            neuron = FlexSN(core, 1, 1, 1, backend="triton")
            for value_range in (range(count // 10), range(count // 10, count)):
                began = time.process_time()
                run(core, neuron, change, value_range, trained)
                seconds_per_value = (time.process_time() - began) / max(len(value_range), 1)
                held = Held.now()
                counts = (held.objects, held.generated, held.descriptors)
                rows.append(
                    (
                        name,
                        value_range.stop,
                        held.files,
                        f"{seconds_per_value * 1e3:.0f}",
                        f"{held.memory:.0f}",
                        *counts,
                    )
                )
    head = ("what changes", "values", "kernels", "CPU ms a value", "MB", "objects", "generated", "descriptors")
    lines = [
        "# Numbers that change between calls",
        "",
        f"`python benchmarks/changing_numbers.py --values {values}`: a neuron that is called once for each value. The",
        "columns show the kernels written so far (forward and backward together), the CPU time of a call with a new",
        "value (including its trace), and what the process holds: memory, objects, modules of generated sources, open",
        "files.",
        "In Triton's interpreter." if triton_interpreted() else "",
        describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "",
        *table(head, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "changing_numbers.md")
    parser.add_argument("--values", type=int, default=10_000)
    arguments = parser.parse_args()
    main(arguments.output, arguments.values)
