"""LIF inference and training against the copy floor and the eager loop, on a GPU.

    python benchmarks/lif_scan.py [FILE]        writes a table; default benchmarks/results/lif_scan.md

Whole calls as a user meets them, through `FlexSNKernel`-style autograd: `inference` is one forward without
gradients, `training` one forward and backward, input gradient included. `copy n` moves as many bytes as n streams
(a stream is one `T x NCL` tensor read or written once): 2 for inference, 5 for training. The first training step is
timed in a process of its own with empty caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from neurons import lif
from torch import Tensor

from flexsn_hop import eager_scan_final_state
from flexsn_runtime import ScanProgram, prepare, scan

SHAPES = ((8, 6_400_000), (32, 1_600_000), (1024, 8192))
LIMITS = {(8, 6_400_000): (1.2, 1.35), (32, 1_600_000): (1.2, 1.35)}


def milliseconds(function: Callable[[], object], rep: int = 200) -> float:
    return float(triton.testing.do_bench(function, warmup=50, rep=rep, return_mode="median"))


def copy_floor(elements: int, streams: int) -> float:
    source = torch.empty(elements * streams // 2, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def compiled(program: ScanProgram, x: Tensor) -> Tensor:
    return scan(*prepare(program, (x,)), state_seqs=False)[0]


def eager(x: Tensor) -> Tensor:
    return eager_scan_final_state(lif, 1, 1, 1, x, torch.zeros_like(x[0]))[0]


def training_step(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(forward(x), x, grad)


def mismatches(program: ScanProgram, steps: int, ncl: int) -> tuple[int, int]:
    x = torch.randn(steps, ncl, device="cuda") + 0.5
    with torch.no_grad():
        return int((compiled(program, x) != eager(x)).sum()), x.numel()


def first_step(order: list[int]) -> list[dict[str, float]]:
    """Seconds of the first training step at each T of `order`, and the kernels compiled until then."""
    code = f"""
import json, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
compiled = []
import triton
triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw)
from flexsn_runtime import ScanProgram, prepare, scan
from neurons import lif
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
program, rows = ScanProgram(lif, 1, 1, 1), []
for steps in {order}:
    x = torch.randn(steps, 100_000, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    scan(*prepare(program, (x,)), state_seqs=False)[0].sum().backward()
    torch.cuda.synchronize()
    rows.append({{"steps": steps, "seconds": time.perf_counter() - begun, "kernels": len(compiled)}})
print(json.dumps(rows))
"""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "FLEXSN_CACHE_DIR": f"{empty}/flexsn"}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            check=True,
        )
    rows: list[dict[str, float]] = json.loads(run.stdout.splitlines()[-1])
    return rows


def shape_rows(steps: int, ncl: int) -> list[str]:
    program = ScanProgram(lif, 1, 1, 1)
    x = torch.randn(steps, ncl, device="cuda") + 0.5
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    rep = 50 if steps > 100 else 200
    with torch.no_grad():
        own, loop = milliseconds(lambda: compiled(program, x)), milliseconds(lambda: eager(x), rep)
    times = [("inference", 2, own, loop)]
    own = milliseconds(training_step(lambda t: compiled(program, t), leaf, grad))
    times.append(("training", 5, own, milliseconds(training_step(eager, leaf, grad), rep)))
    rows = []
    for (what, streams, own, loop), limit in zip(times, LIMITS.get((steps, ncl), ("", "")), strict=True):
        floor = copy_floor(x.numel(), streams)
        cells = (f"{steps} x {ncl}", what, f"{floor:.4f}", f"{own:.4f}", f"{loop:.3f}", f"{own / floor:.2f}", limit)
        rows.append(f"| {' | '.join(map(str, cells))} | {loop / own:.1f} |")
    return rows


def main(path: Path) -> None:
    begun = time.strftime("%Y-%m-%d")
    lines = [
        "# LIF scan, float32",
        "",
        "`python benchmarks/lif_scan.py`: hard reset, `tau = 2`, sigmoid surrogate; medians in ms, in one run.",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {sys.version.split()[0]}, {begun}.",
        "",
        "| T x NCL | what | copy | compiled | eager loop | compiled / copy | at most | loop / compiled |",
        "|---|---|---|---|---|---|---|---|",
        *(row for shape in SHAPES for row in shape_rows(*shape)),
        "",
        "First training step with empty caches, 100 000 elements, one process per row; `kernels` counts compilations",
        "up to and including this step.",
        "",
        "| order | seconds | kernels |",
        "|---|---|---|",
    ]
    for order in ([8, 512], [512, 8]):
        for row in first_step(order):
            where = "first" if row["steps"] == order[0] else f"after T = {order[0]}"
            lines.append(f"| T = {row['steps']:.0f}, {where} | {row['seconds']:.2f} | {row['kernels']:.0f} |")
    program = ScanProgram(lif, 1, 1, 1)
    sizes = ((8, 20_000_003), (100, 1_000_003), (1000, 100_003))
    counts = [mismatches(program, steps, ncl) for steps, ncl in sizes]
    wrong, total = (sum(column) for column in zip(*counts, strict=True))
    lines += ["", f"Spikes that differ from the eager loop: {wrong} of {total}.", ""]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "lif_scan.md"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
