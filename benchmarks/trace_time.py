"""CPU time from a step function to the source of its kernels, and the growth of this time with the function's size.

    python benchmarks/trace_time.py [--output benchmarks/results/trace_time.md] [--repeats 7]

The time covers all work from the Python function to the two Triton sources of a training step: the forward graph
(`trace`), the graph of its gradient (`gradient`), and the scan kernels written from both graphs (`code`). It excludes
the compilation by Triton. No tensor holds data, so the time does not depend on the sizes of the step. Figures are
medians of CPU time in a process that has done the same work once before. Only one thread works, so the CPU time equals
the wall time on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import describe_machine, publish, table
from torch import Tensor

from flexsn_codegen import BackwardSpec, ForwardSpec, InputLayout, backward_source, emit_core, forward_source
from flexsn_graph import trace_step

LIMIT = 0.3  # limit for the LIF neuron, in seconds
NODES = (10, 100, 500, 1000, 2000)

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each part, and the number of ops in the forward graph."""

    nodes: int
    trace: float
    gradient: float
    code: float

    @property
    def total(self) -> float:
        return self.trace + self.gradient + self.code


class Spike(torch.autograd.Function):
    """A Heaviside step of `x`, which is 1 at 0. Its surrogate gradient is the derivative of `sigmoid(4 x)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        soft = torch.sigmoid(4.0 * ctx.saved_tensors[0])
        return grads[0] * 4.0 * soft * (1.0 - soft)


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a LIF step with a hard reset, `tau = 2` and a sigmoid surrogate."""
    h = v + (x - v) / 2.0
    s: Tensor = Spike.apply(h - 1.0)
    return s, h * (1.0 - s)


def chain(nodes: int) -> Step:
    """Returns a step function of `nodes` ops, each of which uses the result of the previous op."""

    def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(nodes // 2):
            v = x - v * 0.5
        return v, v

    return step


def source_times(step: Step) -> Times:
    """Traces a step function, writes its kernels, and returns the times of both."""
    marks = [time.process_time()]
    example = torch.empty(4, device="meta")
    trace = trace_step(step, 1, 1, 1, (example, example))
    marks.append(time.process_time())
    vjp = trace.vjp((True, True), (True, True))
    marks.append(time.process_time())
    core = emit_core(trace.forward, "step", prune=True)
    gradient = emit_core(vjp, "vjp", prune=True, fast_division=True)
    layouts, flags, dtypes = (InputLayout(),), (True,), (torch.float32,)
    forward_source("forward", core, ForwardSpec(layouts, (None,), dtypes, (), flags, (False,), flags, segment=8))
    backward_source(
        "backward",
        core,
        gradient,
        BackwardSpec(
            inputs=layouts,
            states=(None,),
            state_dtypes=dtypes,
            lifted=(),
            num_outputs=1,
            grad_outputs=flags,
            grad_state_seqs=(False,),
            grad_final_states=(False,),
            gradients=vjp.gradients,
            grad_inputs=flags,
            grad_states=(False,),
            grad_lifted=(),
            lifted_dtypes=(),
        ),
    )
    marks.append(time.process_time())
    nodes = sum(node.op == "call_function" for node in trace.forward.graph.nodes)
    return Times(nodes, *(end - begin for begin, end in pairwise(marks)))


def median_times(step: Step, repeats: int) -> Times:
    """Returns the median time of each part. A first run fills torch's caches."""
    source_times(step)
    runs = [source_times(step) for _ in range(repeats)]
    parts = (statistics.median(getattr(run, part) for run in runs) for part in ("trace", "gradient", "code"))
    return Times(runs[0].nodes, *parts)


def exponent(rows: Sequence[Times]) -> float:
    """Returns the exponent `p` of `total = c * nodes**p`, fitted by least squares to the logarithms."""
    return statistics.linear_regression(
        [math.log(row.nodes) for row in rows], [math.log(row.total) for row in rows]
    ).slope


def milliseconds(times: Times) -> Iterator[str]:
    return (f"{1e3 * part:.1f}" for part in (times.trace, times.gradient, times.code, times.total))


def main(path: Path, repeats: int) -> None:
    neuron = median_times(lif, repeats)
    chains = [median_times(chain(nodes), max(1, min(repeats, 1000 // nodes))) for nodes in NODES]
    cores = [("LIF", neuron), *((f"chain of {row.nodes}", row) for row in chains)]
    rows = [(name, t.nodes, *milliseconds(t), f"{1e3 * t.total / t.nodes:.1f}") for name, t in cores]
    lines = [
        "# From a step function to kernel source",
        "",
        "`python benchmarks/trace_time.py`: CPU time in ms from a step to the source of its forward and backward",
        f"kernels. Figures are medians of warm runs in one thread. {os.cpu_count()} cores, shared with other work.",
        f"{describe_machine(torch.device('cpu'))}",
        "",
        *table(("core", "ops", "trace", "gradient", "code", "together", "ms per op"), rows),
        "",
        f"The LIF neuron takes {neuron.total:.3f} s. Its limit is {LIMIT} s.",
        f"The time of chains of {NODES[0]} to {NODES[-1]} ops grows as `ops ** {exponent(chains):.2f}`, and of chains "
        f"of at least {NODES[1]} ops as `ops ** {exponent(chains[1:]):.2f}`.",
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "trace_time.md")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.output, arguments.repeats)
