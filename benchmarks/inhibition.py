"""Steps in which the neurons of a row inhibit each other: training steps of compiled kernels beside those of the loop.

    python benchmarks/inhibition.py [--output FILE] [--seconds 38] [--shapes TxBxN ...]

A training step is a forward and the backward of a random gradient to the input and the matrices, in float32, eager.
Loop and kernels alternate, three times; a figure is a median. Without a GPU, the kernels are in C++.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Results = tuple[Tensor, Tensor, Tensor]


class Inhibited(nn.Module):
    """A LIF neuron; spikes of the step before inhibit it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.spike = ATan()

    def lif(self, current: Tensor, v: Tensor) -> Results:
        h = v + (current - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


class Lateral(Inhibited):
    """By the mean of the row."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(x - s.mean(-1, keepdim=True), v)


class Winner(Inhibited):
    """The largest neuron of a row alone spikes."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        h = v + (x - s - v) / 2
        s = self.spike(h - 1) * (h >= h.amax(-1, keepdim=True))
        return s, s, h * (1 - s)


class Soft(Inhibited):
    """By a softmax over the neurons."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(x * torch.softmax(v, -1) * x.shape[-1], v)


class Normed(Inhibited):
    """A layer norm of the current."""

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        return self.lif(F.layer_norm(x - s + v, x.shape[-1:]), v)


class ExciteInhibit(Inhibited):
    """Through a quarter as many inhibitory neurons, which inhibit each other."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        less = features // 4
        self.to_inhibitory = nn.Parameter(torch.randn(less, features) / features**0.5)
        self.back = nn.Parameter(torch.rand(features, less) / less)

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> Results:
        drive = F.linear(s, self.to_inhibitory)
        inhibition = torch.relu(drive - drive.mean(-1, keepdim=True))
        return self.lif(x - F.linear(inhibition, self.back), v)


CORES: tuple[Callable[[int], Inhibited], ...] = (Lateral, Winner, Soft, Normed, ExciteInhibit)


def timed(run: Run, calls: int) -> float:
    """Milliseconds of a call."""
    synchronize(DEVICE)
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(DEVICE)
    return 1e3 * (time.perf_counter() - begun) / calls


def compared(make: Callable[[int], Inhibited], shape: str) -> list[str]:
    """A row: the loop, kernels, the ratio, how, the first training step."""
    steps, batch, features = map(int, shape.split("x"))
    torch.manual_seed(0)
    core = make(features).to(DEVICE)
    x = 2 * torch.rand(steps, batch, features, device=DEVICE)
    grad = torch.randn_like(x)
    layers = [FlexSN(core, 1, 2, 1, backend=b) for b in ("torch", "triton" if DEVICE.type == "cuda" else "cpp")]
    loop, kernels = (training(Fresh(layer), x, grad) for layer in layers)
    first = timed(kernels, 1)
    timed(loop, 1)
    times = [(timed(loop, 1), timed(kernels, 5)) for _ in range(TURNS)]
    one, other = (statistics.median(values) for values in zip(*times, strict=True))
    told = [line for line in layers[1].explain().splitlines() if "the last " in line]
    how = "one launch" if told and all("one launch for all" in line for line in told) else "step by step"
    for line in told:
        print(line, flush=True)
    return [make.__name__, shape, f"{one:.1f}", f"{other:.3f}", f"{one / other:.1f}", how, f"{first / 1e3:.1f}"]


class Fresh(nn.Module):
    """A layer that begins each call with its first state."""

    def __init__(self, layer: FlexSN) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        result: Tensor = self.layer(x)
        return result


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
        "# Inhibition within a step",
        "",
        f"`python benchmarks/inhibition.py`. {where(DEVICE)}",
        "",
        *table(header, rows),
        "",
        *(f"- not measured: {what}" for what in missing),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "inhibition.md")
    parser.add_argument("--seconds", type=float, default=38.0)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    main(options.shapes, options.seconds, options.output)
