"""Time per frame that neurons add to linear layers, in a network of two layers on the CPU, frame by frame with B = 1.

    python benchmarks/streaming.py [--output benchmarks/results/streaming.md] [--threads 1] [--frames 2000]

Neurons in step mode "s" keep their state from frame to frame. Three networks alternate, with a hundred frames each: the
network, only its linear layers, and the same network with `backend="torch"`. The table shows medians over frames. The
column "beyond the layers" is the median of the network minus that of its linear layers, and "the least" is the minimum
of the network minus that of its linear layers. The difference between these two columns shows how much other work the
machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from torch import Tensor, nn

from flexsn_nn import ALIF, LIF, PLIF, FlexSN, functional

ROUND = 100
INPUTS, HIDDEN, OUTPUTS = 128, 256, 64
Frame = Callable[[Tensor], Tensor]


def make_network(kind: Callable[..., FlexSN], backend: str) -> nn.Sequential:
    """Returns a network of two layers, each of which is a linear layer followed by a neuron."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        kind(step_mode="s", backend=backend),
        nn.Linear(HIDDEN, OUTPUTS),
        kind(step_mode="s", backend=backend),
    ).eval()


def measure_frames(runs: dict[str, Frame], frames: int) -> dict[str, tuple[float, float]]:
    """Returns the median and the minimum time of a frame in each network, in microseconds."""
    x = torch.rand(1, INPUTS)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            run(x)
        for _ in range(max(1, frames // ROUND)):
            for name, run in runs.items():
                for _ in range(ROUND):
                    begun = time.perf_counter()
                    run(x)
                    times[name].append(time.perf_counter() - begun)
    return {name: (1e6 * statistics.median(seconds), 1e6 * min(seconds)) for name, seconds in times.items()}


def main(path: Path, threads: int, frames: int) -> None:
    torch.set_num_threads(threads)
    rows = []
    for kind in (LIF, PLIF, ALIF):
        ours, loop = make_network(kind, "cpp"), make_network(kind, "torch")
        linear = nn.Sequential(ours[0], ours[2])
        us = measure_frames({"linear": linear, "ours": ours, "loop": loop}, frames)
        functional.reset_net(ours)
        added_us = [us["ours"][i] - us["linear"][i] for i in range(2)]
        loop_us = us["loop"][0] - us["linear"][0]
        figures = [us["linear"][0], us["ours"][0], *added_us, loop_us]
        rows.append([type(ours[1]).__name__, *(f"{figure:.0f}" for figure in figures)])
    head = ("neuron", "linear layers", "network", "beyond the layers", "the least", "the loop, beyond them")
    lines = [
        "# A network of two layers, frame by frame",
        "",
        f"`python benchmarks/streaming.py --threads {threads}`. {describe_machine(torch.device('cpu'))} float32, "
        f"B = 1, {INPUTS} to {HIDDEN} to {OUTPUTS}; microseconds of wall time, medians of {frames} frames. Threads:",
        f"{threads} of {os.cpu_count()} processors; load {os.getloadavg()[0]:.1f} at the end.",
        "",
        *table(head, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "streaming.md")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--frames", type=int, default=2000)
    arguments = parser.parse_args()
    main(arguments.output, arguments.threads, arguments.frames)
