"""Times of `flexsn_hop.scan`, compiled without any other package, compared with its eager form and with PyTorch's scan.

    python benchmarks/scan_alone.py [--output FILE] [--steps 200] [--only NAME ...] [--device cpu] [--without-torch]
        [--compilation NAME ...]

Figures are milliseconds of a forward without gradients, and of a training step (forward and backward). Each figure is
the shortest time of several runs in one thread. The runs of all ways alternate. On a CPU, the time is the CPU time of
the process. `first` is the time of the first training step over T steps with empty caches, including compilation.
Compiled scans run with `FLEXSN_HOP_LOWERING=compiled_loop`, so that kernels of another package do not replace them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import recurrences
import torch
from measure import describe_machine, publish, synchronize, table
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves, tree_map

from flexsn_hop import scan
from flexsn_hop.lowering._opaque import _decode

HEADER = [
    *("recurrence", "way", "first, T = 4, s", "first, T = 4000, s", "forward, ms", "training, ms"),
    *("of eager: forward", "training", "of torch's: forward", "training", "differs by"),
]
ROUNDS = 15
LENGTHS = (4, 4000)
# On a CPU, the CPU time of the process is used, because other processes on the machine affect this time least.
CLOCKS = {"cpu": time.process_time, "cuda": time.perf_counter}


class Way:
    """One way to run a recurrence, such as a compiled scan, and the times of its runs."""

    def __init__(self, name: str, work: recurrences.Recurrence, run: Callable[..., Any]) -> None:
        self.name = name
        self._run = run
        self._init, self._xs = work.init, work.xs
        self._leaves = [value for value in tree_leaves((work.init, work.xs)) if value.requires_grad]
        if isinstance(work.step, nn.Module):
            self._leaves += list(work.step.parameters())
        self.times: dict[str, list[float]] = {"forward": [], "training": []}

    def forward(self) -> None:
        with torch.no_grad():
            self._run(self._init, self._xs)

    def training(self) -> Sequence[Tensor]:
        carry, ys = self._run(self._init, self._xs)
        loss = ys.square().mean() + sum(value.square().mean() for value in tree_leaves(carry))
        return torch.autograd.grad(loss, self._leaves)

    def time_pass(self, pass_name: str, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
        synchronize(device)
        begun = clock()
        getattr(self, pass_name)()
        synchronize(device)
        return clock() - begun

    def milliseconds(self, pass_name: str) -> float:
        return 1e3 * min(self.times[pass_name])


def make_ways(name: str, steps: int, device: torch.device, with_torch: bool) -> list[Way]:
    work = recurrences.make(name, steps)
    work = recurrences.Recurrence(
        work.step.to(device) if isinstance(work.step, nn.Module) else work.step,
        *tree_map(lambda value: value.detach().to(device).requires_grad_(), (work.init, work.xs)),
    )

    def run_ours(init: Any, xs: Any) -> Any:
        return scan(work.step, init, xs)

    ways_of_recurrence = [Way("eager", work, run_ours), Way("compiled", work, torch.compile(run_ours, fullgraph=True))]
    if with_torch:
        from torch._higher_order_ops import scan as torch_scan

        def run_theirs(init: Any, xs: Any) -> Any:
            return torch_scan(work.step, init, xs)

        ways_of_recurrence.append(Way("torch's scan, compiled", work, torch.compile(run_theirs, fullgraph=True)))
    return ways_of_recurrence


def measure_compilation(name: str, steps: int, device: torch.device) -> float:
    """Returns the CPU seconds of the first training step of a compiled scan. The caches contain only precompiled
    headers.
    """
    _decode.cache_clear()
    with fresh_cache():
        torch.compile(lambda x: x.sin() * 2)(torch.ones(4))  # Inductor precompiles headers with its first kernel
        torch._dynamo.reset()
        return make_ways(name, steps, device, False)[1].time_pass("training", device, lambda: sum(os.times()[:4]))


def measure_rows(
    name: str, steps: int, device: torch.device, with_torch: bool, with_compilation: bool
) -> list[list[str]]:
    first = {length: f"{measure_compilation(name, length, device):.1f}" for length in LENGTHS if with_compilation}
    torch._dynamo.reset()
    working_ways, failed = [], {}
    all_ways = make_ways(name, steps, device, with_torch)
    for way in all_ways:
        try:
            way.time_pass("training", device)
            way.time_pass("forward", device)
            working_ways.append(way)
        except Exception as error:
            failed[way.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    expected = working_ways[0].training()
    clock = CLOCKS[device.type]
    for _ in range(ROUNDS):
        for way in working_ways:
            for pass_name in way.times:
                way.time_pass(pass_name, device, clock)  # fills the CPU caches, which other ways have overwritten
                way.times[pass_name].append(way.time_pass(pass_name, device, clock))
    rows_of_recurrence = []
    way_by_name = {way.name: way for way in working_ways}
    for way in all_ways:
        if way.name in failed:
            rows_of_recurrence.append([name, way.name, failed[way.name], *[""] * 8])
            continue
        compiled = way.name == "compiled"
        row = [name, way.name, *(first.get(length, "") if compiled else "" for length in LENGTHS)]
        row += [f"{way.milliseconds(pass_name):.2f}" for pass_name in way.times]
        for base in ("eager", "torch's scan, compiled"):
            is_comparable = compiled and base in way_by_name
            row += [
                f"{way.milliseconds(pass_name) / way_by_name[base].milliseconds(pass_name):.2f}"
                if is_comparable
                else ""
                for pass_name in way.times
            ]
        difference = max(
            float((gradient - expected_gradient).abs().max()) / max(1e-30, float(expected_gradient.abs().max()))
            for gradient, expected_gradient in zip(way.training(), expected, strict=True)
        )
        rows_of_recurrence.append([*row, f"{difference:.1e}"])
    return rows_of_recurrence


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_alone.md")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=recurrences.NAMES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-torch", action="store_true", help="do not measure PyTorch's scan")
    parser.add_argument(
        "--compilation", nargs="*", default=recurrences.NAMES, help="recurrences whose first step is timed"
    )
    options = parser.parse_args(argv)
    os.environ["FLEXSN_HOP_LOWERING"] = "compiled_loop"
    torch.set_num_threads(1)
    device = torch.device(options.device)
    all_rows = []
    if options.compilation:
        measure_compilation("EMA", 3, device)  # imports modules
    for name in options.only:
        all_rows += measure_rows(name, options.steps, device, not options.without_torch, name in options.compilation)
        print("\n".join(table(HEADER, all_rows[-3:])), flush=True)
    lines = [
        f"# `scan` without other packages, {options.steps} steps",
        "",
        "`python benchmarks/scan_alone.py`: ms of a forward without gradients and of a training step, as the minimum",
        f"of {ROUNDS} runs in one thread. The runs of the ways alternate, and an untimed run precedes each timed run.",
        "On a CPU, times are CPU times of the process. `first` is the first training step over T steps with empty",
        "caches, including compilation, as CPU time of the process and of its child processes. A ratio is the time of",
        "the compiled scan divided by the time of another way. The machine was shared: several other processes ran on",
        "its two cores. `differs by`: the largest difference of a gradient from eager mode, relative to the largest",
        "element.",
        describe_machine(device),
        "",
        *table(HEADER, all_rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
