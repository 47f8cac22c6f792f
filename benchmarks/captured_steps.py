"""Training steps of whole networks with `flexsn_nn.graphs.capture`: their wall time and the time of their kernels.

    python benchmarks/captured_steps.py [--output benchmarks/results/captured_steps.md] [--only "64-128" VGG]
        [--seconds 100]

The networks come from whole_networks.py. They have LIF neurons, norms in the steps of the neurons, pooling in kernels,
and channels-last images. A step is a call `step(frames, labels)`. It copies the arguments into the memory of the graph,
checks everything that may have changed, replays the graph, and copies the results. The table compares a captured step
with the same step run in Python, and with the sum of the times of its kernels. Captured steps and steps in Python
alternate.
"issued in" is the CPU time of a captured step, without waiting for the GPU. "captured after" is the time from the end
of the first step to the end of the first replay. This time includes steps run in Python, the recording, and the replay.
"between two" is the part of a step in which no kernel runs, divided by the number of kernels. The lower bound of this
time is the gap between two empty kernels. This gap is measured in a graph of many empty kernels, each of which waits
for the previous kernel. The last column divides the time of the step by the sum of the time of its kernels and one such
gap per kernel. If a network fails, its row shows the error. After `--seconds`, no further network starts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from measure import capture_graph, describe_machine, issue_time, kernel_time, milliseconds, publish, synchronize, table
from torch import Tensor
from whole_networks import CASES, FORMATS, Case, describe_error, mean_loss, measure_step

from flexsn_nn import LIF, graphs, spike_pooling
from flexsn_nn.fusion import fuse_norms
from flexsn_nn.graphs import CapturedStep

TURNS = 5
RUNS_BEFORE_A_REPLAY = 3
IDLE_KERNELS = 512
MEASURED_MS = 150


def capture_step(case: Case, device: torch.device) -> tuple[CapturedStep, Tensor, Tensor]:
    """Returns a captured step of a network, and its arguments."""
    torch.manual_seed(0)
    net = case.make(LIF).to(device)
    if case.normed:
        fuse_norms(net)
        spike_pooling(net)
    frames = torch.rand(case.shape, device=device)
    form = case.formats[-1]
    if len(case.formats) > 1:
        net = net.to(memory_format=form)
        frames = frames.flatten(0, 1).contiguous(memory_format=form).unflatten(0, case.shape[:2])
    labels = torch.randint(case.classes, (case.shape[1],), device=device)
    rate = torch.tensor(1e-3, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, fused=device.type == "cuda")
    autocast = None if case.dtype == torch.float32 else case.dtype
    return graphs.capture(net, mean_loss, optimizer, autocast=autocast), frames, labels


def measure_seconds(function: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begun


def measure_walls(case: Case, device: torch.device) -> tuple[list[str], Callable[[], object]]:
    """Returns the cells of a row that precede the times of the kernels, and the captured step."""
    captured, frames, labels = capture_step(case, device)
    first = measure_seconds(lambda: captured(frames, labels), device)
    later = sum(measure_seconds(lambda: captured(frames, labels), device) for _ in range(RUNS_BEFORE_A_REPLAY - 1))

    def step() -> None:
        captured(frames, labels)

    def by_python() -> None:
        captured.step.run(frames, (labels,))

    step()
    count = count_calls(measure_step(step) if device.type == "cuda" else MEASURED_MS)
    walls: dict[Callable[[], None], list[float]] = {step: [], by_python: []}
    for _ in range(TURNS):
        for run, times in walls.items():
            times.append(measure_step(run, count) if device.type == "cuda" else 1e3 * measure_seconds(run, device))
    by_graph, plain = (statistics.median(times) for times in walls.values())
    issued = min(issue_time(step, device, calls=8) for _ in range(TURNS))
    cells = [f"{first:.2f}", f"{later:.2f}", f"{plain:.3f}", f"{issued:.3f}", f"{by_graph:.3f}"]
    print(case.name, *cells, captured.explain().splitlines()[0], sep=" | ", flush=True)
    return cells, step


def count_calls(milliseconds: float) -> int:
    """Returns the number of steps to measure together. Wall time and kernel time are measured over the same number of
    steps, because clock rates drop under load.
    """
    return max(8, int(MEASURED_MS / milliseconds))


class Idle(NamedTuple):
    """Times of empty kernels in a graph, in µs. Each kernel waits for the previous kernel.

    Attributes:
        period: time from the start of a kernel to the start of the next kernel.
        kernel: time of a kernel, from the profiler.
        alone: time from the start of a graph with one kernel to the start of the next such graph.
    """

    period: float
    kernel: float
    alone: float

    @property
    def gap(self) -> float:
        return self.period - self.kernel

    @property
    def launch(self) -> float:
        """Part of a graph's time that is spent neither in its kernels nor in the gaps between them."""
        return self.alone - self.period


@triton.jit
def nothing_kernel(pointer):  # type: ignore[no-untyped-def]
    pass


def measure_idle(device: torch.device) -> Idle:
    """Measures a graph of empty kernels."""
    operand = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(IDLE_KERNELS):
            nothing_kernel[(1,)](operand, num_warps=1)

    replay = capture_graph(launch_all)
    period = statistics.median(milliseconds(replay, device) for _ in range(TURNS))
    microseconds, count = kernel_time(replay, 5)
    replay_one = capture_graph(lambda: nothing_kernel[(1,)](operand, num_warps=1))
    alone = statistics.median(measure_step(replay_one, IDLE_KERNELS) for _ in range(TURNS))
    return Idle(1e3 * period / IDLE_KERNELS, microseconds / count, 1e3 * alone)


def add_kernel_times(cells: list[str], step: Callable[[], object], device: torch.device, empty: Idle) -> list[str]:
    """Returns the cells, extended by the time of the kernels."""
    if device.type != "cuda":
        return [*cells, *[""] * 5]
    try:
        microseconds, count = kernel_time(step, count_calls(float(cells[-1])))
    except Exception as error:
        return [*cells, "", describe_error(error), "", "", ""]
    kernels, wall = microseconds / 1e3, float(cells[-1])
    between, bound = 1e3 * (wall - kernels) / count, kernels + (count * empty.gap + empty.launch) / 1e3
    kernel_cells = [f"{count:.0f}", f"{kernels:.3f}", f"{wall / kernels:.3f}", f"{between:.2f}", f"{wall / bound:.3f}"]
    return [*cells, *kernel_cells]


HEADER = (
    "network", "format", "first step, s", "captured after, s", "by Python, ms", "issued in, ms", "captured, ms",
    "kernels", "their time, ms", "of their time", "between two, µs", "of their time and gaps",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "captured_steps.md")
    parser.add_argument("--only", nargs="*", default=[""], help="only cases whose name contains one of these texts")
    parser.add_argument("--seconds", type=float, default=100.0, help="no further network starts after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    os.environ.setdefault("FLEXSN_LAUNCHER", "compiled")
    begun = time.perf_counter()
    results: list[tuple[Case, list[str], Callable[[], object] | None]] = []
    for case in CASES:
        if not any(part in case.name for part in options.only):
            continue
        if time.perf_counter() - begun > options.seconds:
            results.append((case, ["not run", *[""] * (len(HEADER) - 3)], None))
            continue
        try:
            results.append((case, *measure_walls(case, device)))
        except Exception as error:
            results.append((case, [describe_error(error), *[""] * (len(HEADER) - 3)], None))
    # A profiler may slow down later launches in this process, so all wall times are measured before it runs.
    empty = measure_idle(device) if device.type == "cuda" else Idle(0.0, 0.0, 0.0)
    rows = [
        (
            case.name,
            FORMATS[case.formats[-1]],
            *(cells if step is None else add_kernel_times(cells, step, device, empty)),
        )
        for case, cells, step in results
    ]
    title = "# Captured training steps: wall time and their kernels' time"
    gaps = (
        f"A graph of {IDLE_KERNELS} empty kernels, each of which waits for the previous one, takes {empty.period:.2f} "
        f"µs per kernel. The kernel itself takes {empty.kernel:.2f} µs of it, according to the profiler. The last "
        f"column adds the remaining gap of {empty.gap:.2f} µs for each kernel, and {empty.launch:.2f} µs for the "
        f"graph. (A graph of a single kernel takes {empty.alone:.2f} µs.)"
    )
    publish([title, "", describe_machine(device), "", gaps, "", *table(HEADER, rows)], options.output)


if __name__ == "__main__":
    main()
