"""CPU times of the first training steps of a neuron, of a second instance, of a copy, and with another batch size.

    python benchmarks/new_instances.py [--output benchmarks/results/new_instances.md] [--repeats 3]

Each row is measured in several processes, each of which runs only this row. The kernels are in the cache on disk, which
an earlier process has filled. A training step is a forward and a backward over 8 time steps, in C++ kernels. Times are
CPU times of a process with one thread, as medians over processes. The warm column is the time of a repeated step of the
first instance. The times in the other columns include the work of such a step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from torch import Tensor, nn

from flexsn_nn import ALIF, LIF, RALIF, RLIF, functional

SIZE, STEPS, BATCH = 64, 8, 32
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LIF": LIF,
    "ALIF": ALIF,
    "RLIF(64)": lambda: RLIF(SIZE),
    "RALIF(64)": lambda: RALIF(SIZE),
    "Linear, RALIF, Linear, RALIF": lambda: nn.Sequential(
        nn.Linear(SIZE, SIZE), RALIF(SIZE), nn.Linear(SIZE, SIZE), RALIF(SIZE)
    ),
}
COLUMNS = ("first", "warm", "second instance", "deepcopy", "batch of 24", "batch of 7")


def time_step(net: nn.Module, batch: int = BATCH) -> float:
    """Returns the CPU milliseconds of a training step."""
    x = torch.rand(STEPS, batch, SIZE, requires_grad=True)
    functional.reset_net(net)
    begun = time.process_time()
    y: Tensor = net(x)
    y.sum().backward()
    return 1e3 * (time.process_time() - begun)


def measure(name: str) -> list[float]:
    """Returns the times of a network, in the order of `COLUMNS`."""
    make = NETWORKS[name]
    first = make()
    times = [time_step(first)]
    time_step(first)
    times.append(time_step(first))
    times += [time_step(make()), time_step(copy.deepcopy(first)), time_step(first, 24), time_step(first, 7)]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "new_instances.md")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--network", help="measure one network in this process, and print the times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.network is not None:
        print(*measure(options.network))
        return
    rows = []
    for name in NETWORKS:
        runs = []
        for _ in range(options.repeats + 1):
            command = [sys.executable, __file__, "--network", name]
            process = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append([float(number) for number in process.stdout.split()])
        rows.append([name, *(f"{statistics.median(column):.1f}" for column in zip(*runs[1:], strict=True))])
    lines = [
        "# New instances and batch sizes",
        "",
        describe_machine(torch.device("cpu")),
        "",
        "CPU milliseconds of a training step, with the kernels in the cache on disk:",
        "",
        *table(("network", *COLUMNS), rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
