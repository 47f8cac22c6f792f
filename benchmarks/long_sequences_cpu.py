"""Times of one sequence of few neurons over a million steps on the CPU. Several threads run segments of the sequence.

    OMP_WAIT_POLICY=passive python benchmarks/long_sequences_cpu.py [--output FILE] [--threads 2] [--calls 60]

Calls with one thread and with several threads alternate. On a machine that other processes also use, wall time means
little. Therefore, the table also shows the running time of the busiest thread of a call. Linux counts the running time
of each thread. The wall time in the table is the shortest time of a call. With one thread, the running time covers the
whole call. With several threads, the running time of the busiest thread is the time that a call would take if each
thread had a separate core. A waiting thread must not spin, because spinning would count as running time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from torch import Tensor

from flexsn_nn import FlexSN
from flexsn_nn.neuron import ALIF, LI, LIF, Izhikevich

HEADER = [
    *("neuron", "call", "segments, warm-up", "one thread", "threads", "times"),
    *("one thread, busiest", "threads, busiest", "times", "equal"),
]
NEURONS: dict[str, Callable[[], FlexSN]] = {
    "LIF, tau 2": lambda: LIF(backend="cpp"),
    "LIF, tau 20": lambda: LIF(tau=20.0, backend="cpp"),
    "ALIF, tau_a 20": lambda: ALIF(tau_a=20.0, backend="cpp"),
    "Izhikevich": lambda: Izhikevich(a=0.2, b=0.3, backend="cpp"),
    "LI": lambda: LI(backend="cpp"),
}
LEARNING = 10  # number of calls during which a warm-up is chosen
TOGETHER = 10  # number of calls between two readings of the threads' times


def read_thread_times() -> dict[str, int]:
    """Returns the nanoseconds that each thread of the process has run."""
    folder = Path("/proc/self/task")
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in folder.iterdir()}


class Call:
    """Calls of one neuron with a given number of threads, and the times of these calls."""

    def __init__(self, neuron: FlexSN, x: Tensor, threads: int, *, training: bool) -> None:
        self._neuron, self._threads = neuron, threads
        self._x = x.clone().requires_grad_(training)
        self._grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) if training else None
        self.least = float("inf")
        self._calls, self._ran = 0, Counter[str]()

    def run(self) -> Tensor:
        torch.set_num_threads(self._threads)
        self._neuron.reset()
        if self._grad is None:
            with torch.no_grad():
                result: Tensor = self._neuron(self._x)
                return result
        (gradient,) = torch.autograd.grad(self._neuron(self._x), self._x, self._grad)
        return gradient

    def measure(self) -> None:
        """Calls the neuron several times, because the system counts the time of a thread in ticks."""
        before = read_thread_times()
        for _ in range(TOGETHER):
            begun = time.perf_counter()
            self.run()
            self.least = min(self.least, 1e3 * (time.perf_counter() - begun))
        self._ran.update({name: now - before.get(name, 0) for name, now in read_thread_times().items()})
        self._calls += TOGETHER

    @property
    def busiest(self) -> float:
        """Average running time of the busiest thread in a call, in milliseconds."""
        return max(self._ran.values()) / self._calls / 1e6


def describe_segments(neuron: FlexSN) -> str:
    """Describes the segments of the forward: their number and the number of warm-up steps, or that it is serial."""
    program = neuron._get_program()
    for step in program.specializations:
        for speculation in step.speculations.values():  # type: ignore[attr-defined]
            last = speculation.last
            if not speculation.converges:
                return "serial, since trajectories do not converge"
            return f"{last.segments}, {last.warm_up}"
    return "serial"


def measure_rows(name: str, x: Tensor, threads: int, calls: int) -> list[list[str]]:
    rows = []
    for training in (False, True):
        neurons = [NEURONS[name]() for _ in range(2)]
        serial, parallel = (Call(n, x, t, training=training) for n, t in zip(neurons, (1, threads), strict=True))
        for _ in range(LEARNING):
            parallel.run()
        first, second = serial.run(), parallel.run()
        difference = float((first - second).abs().max())
        for _ in range(max(calls // (4 if training else 1) // TOGETHER, 1)):
            serial.measure()
            parallel.measure()
        rows.append(
            [
                *(name, "training" if training else "inference", describe_segments(neurons[1])),
                *(f"{serial.least:.2f}", f"{parallel.least:.2f}", f"{serial.least / parallel.least:.2f}"),
                *(f"{serial.busiest:.2f}", f"{parallel.busiest:.2f}", f"{serial.busiest / parallel.busiest:.2f}"),
                "bitwise" if torch.equal(first, second) else f"to {difference:.1e}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "long_sequences_cpu.md")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--neurons", type=int, default=8)
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args()
    x = torch.randn(options.steps, options.neurons, generator=torch.Generator().manual_seed(0)) * 0.85 + 0.5
    before = os.getloadavg()[0]
    rows = [row for name in NEURONS for row in measure_rows(name, x, options.threads, options.calls)]
    lines = [
        "# One long stream on the CPU",
        "",
        f"`OMP_WAIT_POLICY=passive python benchmarks/long_sequences_cpu.py --threads {options.threads}`:",
        f"{options.steps:,} steps of {options.neurons} neurons, float32, kernels in C++, milliseconds per call. Calls",
        f"with one thread and with {options.threads} threads alternate. Figures are minima over {options.calls} calls",
        "(about a quarter of this number in training). `busiest` is the average running time of the busiest thread,",
        "which excludes waiting for other processes. Load averages before and after: "
        f"{before:.1f} and {os.getloadavg()[0]:.1f}, on",
        f"{os.cpu_count()} processors.",
        describe_machine(torch.device("cpu")),
        "",
        *table(HEADER, rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
