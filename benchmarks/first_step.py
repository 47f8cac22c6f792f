"""Parts of the first training step with empty caches, on a GPU, followed by steps with another T and other sizes.

    python benchmarks/first_step.py [--output FILE] [--steps 8 64 1024]

Each T is measured in a separate process with empty caches. `import` is the import of this project and Triton, after
torch has been imported. `Dynamo` is the import of torch's compiler. torch's first fake tensor triggers it, by default
in the first step. The following columns split the first training step of LIF, in seconds: its trace, the source code of
the kernels, their compilation (forward and backward kernel are compiled at the same time), and the rest (allocation,
Triton's first launch, autograd). Afterwards, the module is called with another T and with other step sizes. The table
shows the number of kernels that each of these calls compiles.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import publish, synchronize, table, where

LIMIT = 2.5
NCL = 100_000
LARGEST = 2**30  # elements in a sequence
HEADER = ["T", "import", "Dynamo", "trace", "write", "compile", "rest", "first step", "at most", "kernels"]


class Clock:
    """Sums the seconds during which at least one thread runs a timed function."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._begun: dict[str, float] = {}
        self._lock = threading.Lock()

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[what] += 1
                if not self._running[what]:
                    self._begun[what] = time.perf_counter()
                self._running[what] += 1
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._running[what] -= 1
                    if not self._running[what]:
                        self.seconds[what] += time.perf_counter() - self._begun[what]

        return run


def watch() -> Clock:
    """Measures the public functions of each part with a clock. This has to happen before other modules import them."""
    import triton.compiler

    import flexsn_codegen
    import flexsn_graph

    clock = Clock()
    flexsn_graph.trace_step = clock.timed("trace", flexsn_graph.trace_step)
    flexsn_graph.StepTrace.vjp = clock.timed("trace", flexsn_graph.StepTrace.vjp)  # type: ignore[method-assign]
    for name in ("emit_core", "forward_source", "backward_source"):
        setattr(flexsn_codegen, name, clock.timed("write", getattr(flexsn_codegen, name)))
    triton_target = flexsn_codegen.TRITON
    triton_target.compile = clock.timed("write", triton_target.compile)  # type: ignore[method-assign]
    # A kernel may reach the compiler through any of these names.
    compile_kernel = clock.timed("compile", triton.compiler.compiler.compile)
    triton.compiler.compiler.compile = triton.compiler.compile = triton.compile = compile_kernel
    return clock


def work(steps: int, ncl: int, device: torch.device) -> dict[str, Any]:
    """Runs in a separate process: first a step at `steps`, and then the other calls."""
    torch.zeros(1, device=device)
    begun = time.perf_counter()
    clock = watch()
    from step_functions import lif

    from flexsn_nn import FlexSN

    imported = time.perf_counter() - begun
    begun = time.perf_counter()
    importlib.import_module("torch._dynamo")
    dynamo = time.perf_counter() - begun
    neuron = FlexSN(lif, 1, 1, 1, backend="triton")

    def train(num_steps: int, size: int) -> tuple[float, int]:
        x = torch.randn(num_steps, size, device=device, requires_grad=True)
        grad = torch.randn(num_steps, size, device=device)
        neuron.reset()
        synchronize(device)
        begun, known = time.perf_counter(), clock.calls["compile"]
        torch.autograd.grad(neuron(x), x, grad)
        synchronize(device)
        return time.perf_counter() - begun, clock.calls["compile"] - known

    total, kernels = train(steps, ncl)
    parts = {what: clock.seconds[what] for what in ("trace", "write", "compile")}
    others = [(t, ncl) for t in (1, 7, 512) if t != steps]
    others += [(steps, size) for size in (ncl - 16, ncl // 2 + 1, ncl // 50, 8 * ncl, 64 * ncl)]
    later = [(t, size, *train(t, size)) for t, size in others if t * size <= LARGEST]
    return {"import": imported, "Dynamo": dynamo, "total": total, "kernels": kernels, "parts": parts, "later": later}


def measure(steps: int, chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "FLEXSN_CACHE_DIR": f"{empty}/flexsn"}
        arguments = ["--worker", "--steps", str(steps), "--ncl", str(chosen.ncl), "--device", chosen.device]
        run = subprocess.run(
            [sys.executable, __file__, *arguments],
            env={**os.environ, **caches},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def cells(steps: int, found: dict[str, Any]) -> list[str]:
    parts = [found["parts"][what] for what in ("trace", "write", "compile")]
    rest = found["total"] - sum(parts)
    seconds = [found["import"], found["Dynamo"], *parts, rest, found["total"]]
    return [str(steps), *(f"{value:.2f}" for value in seconds), str(LIMIT), str(found["kernels"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "first_step.md")
    parser.add_argument("--steps", nargs="+", type=int, default=[8, 64, 1024], metavar="T")
    parser.add_argument("--ncl", type=int, default=NCL, help="elements of a step")
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if chosen.worker:
        print(json.dumps(work(chosen.steps[0], chosen.ncl, device)))
        return
    found = {steps: measure(steps, chosen) for steps in chosen.steps}
    later = [
        [f"{first}", f"{t} x {size}", f"{seconds:.3f}", str(kernels)]
        for first, one in found.items()
        for t, size, seconds, kernels in one["later"]
    ]
    lines = [
        f"# First training step, LIF, {chosen.ncl} elements, float32",
        "",
        "`python benchmarks/first_step.py`: seconds with empty caches. Each T runs in a separate process.",
        where(device),
        "",
        *table(HEADER, [cells(steps, one) for steps, one in found.items()]),
        "",
        "Later calls in the same processes, with another T or another size of the step:",
        "",
        *table(["after T", "T x NCL", "seconds", "kernels compiled"], later),
    ]
    publish(lines, chosen.output)


if __name__ == "__main__":
    main()
