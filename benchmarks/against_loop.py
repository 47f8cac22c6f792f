"""Comparison of training steps in compiled kernels and in the loop, with a row for each step function and shape.

`inhibition.py` and `other_shapes.py` call `main` with their step functions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, publish, synchronize, table
from recurrence import Run, make_training_step
from torch import Tensor, nn

from flexsn_nn import FlexSN

SHAPES = ("250x256x128", "250x256x512")
TURNS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADER = ("step", "T x B x N", "loop, ms", "kernels, ms", "ratio", "by", "first training step, s")


class Fresh(nn.Module):
    """A layer that starts each call from its initial state."""

    def __init__(self, layer: FlexSN) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        result: Tensor = self.layer(x)
        return result


def time_call(run: Run, calls: int) -> float:
    """Returns the mean time of a call, in milliseconds."""
    synchronize(DEVICE)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(DEVICE)
    return 1e3 * (time.perf_counter() - begun) / calls


def compare(make: Callable[[int], nn.Module], layer: Callable[[Any, str], FlexSN], shape: str) -> list[str]:
    """Returns a row: the times of the loop and of the kernels, the ratio of these times, the way in which the kernels
    ran, and the time of the first training step.
    """
    steps, batch, neurons = map(int, shape.split("x"))
    torch.manual_seed(0)
    core = make(neurons).to(DEVICE)
    x = 2 * torch.rand(steps, batch, neurons, device=DEVICE)
    grad = torch.randn_like(x)
    layers = [layer(core, backend) for backend in ("torch", "triton" if DEVICE.type == "cuda" else "cpp")]
    loop, kernels = (make_training_step(Fresh(loop_ms), x, grad) for loop_ms in layers)
    first_ms = time_call(kernels, 1)
    time_call(loop, 1)
    times = [(time_call(loop, 1), time_call(kernels, 5)) for _ in range(TURNS)]
    loop_ms, kernel_ms = (statistics.median(values) for values in zip(*times, strict=True))
    loop_lines = [line for line in layers[1].explain().splitlines() if "the last " in line]
    way = "one launch" if loop_lines else "pieces"
    if any("step by step" in line for line in loop_lines):
        way = "step by step"
    for line in loop_lines:
        print(line, flush=True)
    return [
        core.__class__.__name__,
        shape,
        f"{loop_ms:.1f}",
        f"{kernel_ms:.3f}",
        f"{loop_ms / kernel_ms:.1f}",
        way,
        f"{first_ms / 1e3:.1f}",
    ]


def main(name: str, title: str, cores: Sequence[type[nn.Module]], layer: Callable[[Any, str], FlexSN]) -> None:
    """Parses the command line, and writes a table.

    Args:
        name: name of the script, without its suffix.
        title: title of the table.
        cores: classes of step functions. Their constructors receive the number of neurons.
        layer: function that makes a layer from a core and the name of a backend.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"{name}.md")
    parser.add_argument("--seconds", type=float, default=55.0, help="no further row starts after this time")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="TxBxN")
    parser.add_argument("--only", nargs="*", default=[core.__name__ for core in cores], metavar="NAME")
    options = parser.parse_args()
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    for shape in options.shapes:
        for make in cores:
            if make.__name__ not in options.only:
                continue
            if time.perf_counter() - begun > options.seconds:
                missing.append(f"- not measured: {make.__name__}, {shape}: no time was left")
                continue
            rows.append(compare(make, layer, shape))
            print(rows[-1], flush=True)
            head = [f"# {title}", "", f"`python benchmarks/{name}.py`. {describe_machine(DEVICE)}", ""]
            publish([*head, *table(HEADER, rows), "", *missing], options.output)
