"""Times of training steps on a GPU in which the forward saves values for the backward, or the backward recomputes them.

    python benchmarks/residuals.py [--output FILE] [--shapes 8x6400000 ...]

Times come from replays of a CUDA graph of the step. A step that recomputes reads the inputs again, and writes and reads
checkpoints. A step that saves writes and reads residuals. `auto` shows which of these two steps moves fewer bytes, and
is therefore the default. If the gradients of the two steps differ by more than rounding errors, the script stops.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import capture_graph, describe_machine, milliseconds, publish, run_in_processes, table
from scan_models import Model, Work
from step_functions import lif
from torch import Tensor

from flexsn_nn import FlexSN
from flexsn_nn.neuron import LI, LIF
from flexsn_nn.surrogate import Rect
from flexsn_runtime import PointwiseProgram, prepare

SHAPES = ("8x6400000", "128x524288", "512x32768", "1024x8192")
HEADER = ["neuron", "T x NCL", "recompute, ms", "save, ms", "save / recompute", "auto"]


def four_dendrites(a: Tensor, b: Tensor, c: Tensor, d: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a LIF step on a weighted sum of four inputs."""
    return lif(a + 0.5 * b - c + 0.25 * d, v)


NEURONS: dict[str, tuple[Callable[..., FlexSN], int]] = {
    "LIF": (partial(FlexSN, lif, 1, 1, 1), 1),
    "LIF, rectangular surrogate, detached reset": (
        partial(LIF, surrogate_function=Rect(), detach_reset=True),
        1,
    ),
    "leaky integrator": (LI, 1),
    "LIF of four inputs": (partial(FlexSN, four_dendrites, 4, 1, 1), 4),
}

Case = tuple[str, str, str]  # neuron, shape, residuals


def make_work(case: Case, device: torch.device) -> Work:
    name, shape, residuals = case
    make, num_inputs = NEURONS[name]
    steps, ncl = map(int, shape.split("x"))
    return Work(Model(partial(make, residuals=residuals), num_inputs), steps, ncl, device)


def compile_one(case: Case) -> None:
    """Compiles the kernels into Triton's cache. Runs in a separate process."""
    make_work(case, torch.device("cuda")).train()


def make_row(name: str, shape: str, device: torch.device) -> list[str]:
    times = []
    gradients: list[tuple[Tensor, ...]] = []
    for residuals in ("recompute", "save"):
        work = make_work((name, shape, residuals), device)
        gradients.append(work.train())
        run = capture_graph(work.train) if device.type == "cuda" else work.train
        times.append(milliseconds(run, device))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    work = make_work((name, shape, "auto"), device)
    neuron = work.neuron
    program = PointwiseProgram(neuron.core, neuron.num_inputs, neuron.num_states, neuron.num_outputs)
    step, arguments = prepare(program, work.inputs)
    saves = step.residuals(tuple(t is not None and t.requires_grad for t in arguments.all))
    default = "recompute" if saves is None else "save"
    return [name, shape, *(f"{t:.3f}" for t in times), f"{times[1] / times[0]:.2f}", default]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "residuals.md")
    parser.add_argument("--device", default="cuda", help="cpu runs small sizes, to test this script")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        run_in_processes(
            compile_one, [(n, s, r) for n in NEURONS for s in options.shapes for r in ("recompute", "save")]
        )
    rows = [make_row(name, shape, device) for name in NEURONS for shape in options.shapes]
    lines = ["# Training steps that recompute or save values, float32", ""]
    lines += ["`python benchmarks/residuals.py`. The docstring of the script describes the comparison."]
    publish([*lines, describe_machine(device), "", *table(HEADER, rows)], options.output)


if __name__ == "__main__":
    main()
