"""Bytes of memory that a training step of LIF needs on a GPU, per element and step.

    python benchmarks/scan_memory.py [--output FILE] [--peers FOLDER] [--shape 32x1600000]

The input and the gradient of the output (4 bytes each in float32) belong to the caller and are not counted. `held` is
the memory that is allocated between forward and backward. `peak` is the largest amount that is allocated during the
forward or the backward. Both columns include the output (4 bytes), and `peak` also includes the gradient of the input
(another 4 bytes). The scan itself needs the rest.

The scan is expected to need 4 / K bytes for a checkpoint of the state every K steps, and 4 / T bytes for the final
state. The last column is the fraction 1 / K that follows from `held`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from peer_neurons import is_installed
from scan_models import MODELS, Work
from scan_peers import PEERS, Forward, run_loop
from torch import Tensor

OUTPUT = 4.0
GRADIENT = 4.0
PEER_NAMES = ("SpikingJelly 2 LIFNode, Triton", "SpikingJelly 2 FlexSN")
HEADER = ["who", "held", "held, less the output", "peak", "peak, less output and gradient", "states held: 1 / K"]


def measure_bytes(forward: Forward, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Returns `(held, peak)` of a second step, because the first step compiles kernels."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = forward(x)
        held = torch.cuda.memory_allocated() - before
        gradient = torch.autograd.grad(output, x, grad)
        peak = torch.cuda.max_memory_allocated() - before
        del output, gradient
    return held / x.numel(), peak / x.numel()


def list_peers(peers: Path) -> list[tuple[str, Callable[[], Forward]]]:
    """Returns the peers that can be imported."""
    sys.path.append(str(peers / "sj2"))
    if not is_installed("spikingjelly"):
        return []
    return [(name, PEERS[name].make) for name in PEER_NAMES]


def make_row(name: str, measured: tuple[float, float], steps: int, *, counts: bool) -> list[str]:
    held, peak = measured
    scan_bytes = held - OUTPUT
    fraction = f"{(scan_bytes - 4.0 / steps) / 4.0:.3f}" if counts else ""
    return [name, *(f"{value:.2f}" for value in (held, scan_bytes, peak, peak - OUTPUT - GRADIENT)), fraction]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_memory.md")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the peers that are not installed")
    parser.add_argument("--shape", default="32x1600000", help="T x NCL")
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    steps, ncl = map(int, options.shape.split("x"))
    work = Work(MODELS["LIF"], steps, ncl, device)
    (x,) = work.inputs
    grad = torch.randn_like(x)
    rows = [make_row("FlexSN", measure_bytes(lambda x: work.forward()[0], x, grad), steps, counts=True)]
    work.neuron.reset()
    rows.append(make_row("the loop", measure_bytes(run_loop, x, grad), steps, counts=False))
    for name, make in list_peers(options.peers):
        try:
            rows.append(make_row(name, measure_bytes(make(), x, grad), steps, counts=False))
        except RuntimeError as error:
            rows.append([name, f"failed: {str(error).splitlines()[0]}", "", "", "", ""])
    lines = [
        f"# Memory of a training step, LIF at {steps} x {ncl}, float32",
        "",
        "`python benchmarks/scan_memory.py`: bytes per element and step, without the input and the gradient of the",
        "output. `held`: memory between forward and backward. `peak`: maximum during forward and backward. The output",
        "and the gradient of the input take 4 bytes each. The scan is expected to need 4 / K bytes for checkpoints and",
        f"4 / T = {4 / steps:.3f} bytes for the final state.",
        describe_machine(device),
        "",
        *table(HEADER, rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
