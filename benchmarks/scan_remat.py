"""Memory of long scans on a CPU that save only every K-th carry: `flexsn_hop.scan(..., remat=K)`.

    python benchmarks/scan_remat.py [--output FILE] [--steps 100000] [--size 65536] [--eager-steps 4000]

The recurrence is `h = h + a (x - h)`. The carry h and the parameter a have `--size` elements, and x is a scalar in each
step. A training step computes the gradient of a. The scan is compiled with `FLEXSN_HOP_LOWERING=compiled_loop`. Each
row runs in a separate process, which first runs training steps over a few time steps. `peak` is the largest memory of
the process during the measured training step, as counted by the system (`VmHWM`), minus its memory before this step.
The peak includes Python's memory for the code that calls the steps. Scans without `remat` only run over
`--eager-steps`, because they hold T carries in memory. For this T, the bits of the gradients with and without `remat`
are compared.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from torch import Tensor

from flexsn_hop import scan

HEADER = ["way", "T", "remat", "time, s", "peak, MB", "peak, carries", "2 sqrt(T)", "bits of the gradient"]


def read_memory(field: str) -> int:
    """Returns the number of bytes of this process's memory (`VmRSS`), or the largest number so far (`VmHWM`)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


def make_network(way: str, size: int, remat: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of `a` and `x` that runs the scan and returns the mean of the last carry."""

    def run(a: Tensor, x: Tensor) -> Tensor:
        h, _ = scan(lambda h, x: (h + a * (x - h), None), torch.zeros(size), x, remat=remat)
        return h.mean()

    return run if way == "eager" else torch.compile(run, fullgraph=True, dynamic=True)


def measure(way: str, steps: int, size: int, remat: int | None) -> str:
    """Returns a text with the seconds, the peak of the memory, and a checksum of the gradient's bits. Runs in the
    process of one row.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    a = torch.rand(size, requires_grad=True)
    x = torch.randn(steps, 1)
    run = make_network(way, size, remat)
    for first in (7, 9):
        torch.autograd.grad(run(a, x[:first]), a)
    Path("/proc/self/clear_refs").write_text("5")
    before = read_memory("VmRSS")
    begun = time.perf_counter()
    (gradient,) = torch.autograd.grad(run(a, x), a)
    seconds = time.perf_counter() - begun
    bits = int(gradient.view(torch.int32).long().sum())
    return f"{seconds} {read_memory('VmHWM') - before} {bits}"


def measure_row(way: str, steps: int, size: int, remat: int | None) -> tuple[list[str], str]:
    command = [sys.executable, __file__, "--measure", way, str(steps), str(size), str(remat or 0)]
    # With this setting, each carry has a separate memory map, which is released when the carry is freed. In a heap,
    # smaller objects between the carries would prevent this.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    limit = f"{2 * math.sqrt(steps):.0f}"
    if result.returncode:
        return [way, str(steps), str(remat or ""), "failed", "", "", limit, ""], ""
    seconds, peak, bits = result.stdout.split()[-3:]
    carries = float(peak) / (4 * size)
    figures = [f"{float(seconds):.1f}", f"{float(peak) / 2**20:.0f}", f"{carries:.0f}", limit]
    return [way, str(steps), str(remat or ""), *figures], bits


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_remat.md")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=65_536)
    parser.add_argument("--eager-steps", type=int, default=4_000)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ["FLEXSN_HOP_LOWERING"] = "compiled_loop"
    if options.measure:
        way, steps, size, remat = options.measure
        print(measure(way, int(steps), int(size), int(remat) or None))
        return
    rows = []
    for way, lengths in (("eager", [options.eager_steps]), ("compiled", [options.eager_steps, options.steps])):
        for steps in lengths:
            checksums = []
            for remat in (None, math.isqrt(steps)) if steps == options.eager_steps else (math.isqrt(steps),):
                cells, bits = measure_row(way, steps, options.size, remat)
                checksums.append(bits)
                rows.append([*cells, ("equal" if bits == checksums[0] else "differ") if len(checksums) > 1 else ""])
                print("\n".join(table(HEADER, rows[-1:])), flush=True)
    lines = [
        f"# Memory of long scans, a carry of {options.size} float32",
        "",
        "`python benchmarks/scan_remat.py`: a training step of a moving average with a learned coefficient for each",
        "element. `peak` is the largest memory during the step minus the memory before it, in MB and in carries. It",
        "includes Python's memory for the code that calls steps and, in eager mode, autograd's nodes",
        "(`MALLOC_MMAP_THRESHOLD_=32768`).",
        describe_machine(torch.device("cpu")),
        "",
        *table(HEADER, rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
