"""States of other shapes: training steps of compiled kernels beside those of the loop.

    python benchmarks/other_shapes.py [--output FILE] [--seconds 55] [--shapes TxBxN ...]

A dendritic neuron has a soma, an apical compartment and four branches `[B, N, 4]`, which a 4 x 4 matrix joins. A
network of excitatory and inhibitory neurons has a quarter as many of these. A training step is a forward and the
backward of a random gradient to the input and the parameters, in float32, eager. Loop and kernels alternate, three
times; a figure is a median. Without a GPU, the kernels are in C++.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import publish, synchronize, table, where
from recurrence import Run, training
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_nn.surrogate import ATan

SHAPES = ("250x256x128", "250x256x512")
TURNS = 3
BRANCHES = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Dendritic(nn.Module):
    """Branches drive a soma; the largest one opens an apical compartment, which adds to the soma.

    A `matrix` joins the branches of a neuron.
    """

    def __init__(self, neurons: int, *, matrix: bool = True) -> None:
        super().__init__()
        self.spike = ATan()
        self.weight = nn.Parameter(torch.rand(neurons, BRANCHES))
        self.between = nn.Parameter(0.7 * torch.eye(BRANCHES) + 0.05) if matrix else None

    def forward(self, x: Tensor, soma: Tensor, apical: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        held = 0.75 * branches if self.between is None else F.linear(branches, self.between)
        branches = held + x.unsqueeze(-1) * self.weight
        local = torch.sigmoid(4 * branches - 2)
        apical = 0.9 * apical + 0.1 * local.amax(-1)
        h = soma + (local.sum(-1) + apical - soma) / 2
        s = self.spike(h - 1)
        return s, h * (1 - s), apical, branches

    def states(self, like: Tensor) -> list[Tensor]:
        zero = torch.zeros_like(like)
        return [zero, zero.clone(), like.new_zeros(*like.shape, BRANCHES)]


class Branches(Dendritic):
    """The same, with branches that are not joined."""

    def __init__(self, neurons: int) -> None:
        super().__init__(neurons, matrix=False)


class Populations(nn.Module):
    """Excitatory neurons, and a quarter as many inhibitory ones: both are LIF neurons, and have recurrent weights."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.spike, self.less = ATan(), neurons // 4
        self.ei = nn.Parameter(torch.rand(self.less, neurons) / neurons)
        self.ie = nn.Parameter(torch.rand(neurons, self.less) / self.less)
        self.within(neurons)

    def within(self, neurons: int) -> None:
        self.ee = nn.Parameter(torch.rand(neurons, neurons) / neurons)

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + F.linear(s, self.ee) - F.linear(inhibitory, self.ie) - v) / 2
        k = u + (4 * F.linear(s, self.ei) - u) / 2
        s, inhibitory = self.spike(h - 1), self.spike(k - 1)
        return s, s, h * (1 - s), inhibitory, k * (1 - inhibitory)

    def states(self, like: Tensor) -> list[Tensor]:
        zero, less = torch.zeros_like(like), like.new_zeros(*like.shape[:-1], self.less)
        return [zero, zero.clone(), less, less.clone()]


class Disynaptic(Populations):
    """The same, without weights among excitatory neurons."""

    def within(self, neurons: int) -> None:
        pass

    def forward(self, x: Tensor, s: Tensor, v: Tensor, inhibitory: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - F.linear(inhibitory, self.ie) - v) / 2
        k = u + (4 * F.linear(s, self.ei) - u) / 2
        s, inhibitory = self.spike(h - 1), self.spike(k - 1)
        return s, s, h * (1 - s), inhibitory, k * (1 - inhibitory)


CORES = (Dendritic, Branches, Populations, Disynaptic)


class Layer(FlexSN):
    """A layer that begins each call with its first state."""

    core: Dendritic | Populations

    def __init__(self, core: Dendritic | Populations, backend: str) -> None:
        super().__init__(core, 1, 3 if isinstance(core, Dendritic) else 4, 1, backend=backend)

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        return self.core.states(inputs[0][0])

    def forward(self, *inputs: Tensor, **options: object) -> Tensor | list[Tensor]:
        self.reset()
        return super().forward(*inputs, **options)  # type: ignore[arg-type]


def timed(run: Run, calls: int) -> float:
    """Milliseconds of a call."""
    synchronize(DEVICE)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(DEVICE)
    return 1e3 * (time.perf_counter() - begun) / calls


def compared(make: type[Dendritic | Populations], shape: str) -> list[str]:
    """A row: the loop, kernels, the ratio, how, the first training step."""
    steps, batch, neurons = map(int, shape.split("x"))
    torch.manual_seed(0)
    core = make(neurons).to(DEVICE)
    x = 2 * torch.rand(steps, batch, neurons, device=DEVICE)
    grad = torch.randn_like(x)
    layers = [Layer(core, backend) for backend in ("torch", "triton" if DEVICE.type == "cuda" else "cpp")]
    loop, kernels = (training(layer, x, grad) for layer in layers)
    first = timed(kernels, 1)
    timed(loop, 1)
    times = [(timed(loop, 1), timed(kernels, 5)) for _ in range(TURNS)]
    one, other = (statistics.median(values) for values in zip(*times, strict=True))
    told = [line for line in layers[1].explain().splitlines() if "the last " in line]
    in_one = all("one launch for all" in line or "clusters" in line for line in told)
    how = "pieces" if not told else "one launch" if in_one else "step by step"
    for line in told:
        print(line, flush=True)
    return [make.__name__, shape, f"{one:.1f}", f"{other:.3f}", f"{one / other:.1f}", how, f"{first / 1e3:.1f}"]


def main(shapes: list[str], seconds: float, path: Path) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    for shape in shapes:
        for make in CORES:
            if time.perf_counter() - begun > seconds:
                missing.append(f"{make.__name__}, {shape}: no time was left")
                continue
            rows.append(compared(make, shape))
            print(rows[-1], flush=True)
    header = ["step", "T x B x N", "loop, ms", "kernels, ms", "ratio", "by", "first training step, s"]
    lines = [
        "# States of other shapes",
        "",
        f"`python benchmarks/other_shapes.py`. {where(DEVICE)}",
        "",
        *table(header, rows),
        "",
        *(f"- not measured: {what}" for what in missing),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "other_shapes.md")
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    main(options.shapes, options.seconds, options.output)
