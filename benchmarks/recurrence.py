"""Recurrent LIF: launches step by step against the loop, snnTorch's `RLeaky` and torch's `nn.RNN`.

    python benchmarks/recurrence.py [--output FILE] [--shapes 250x256x128 ...] [--dtypes ...]

A shape is T x batch x neurons. A training step is the forward and the backward of a random gradient, to the input and
the matrix. On a GPU the loop is captured in a CUDA graph, too. All that is compared takes turns; a figure is the median
of its rounds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measure import graphed, milliseconds, publish, table, where
from torch import Tensor, nn

from flexsn_nn import RLIF

GPU_SHAPES = ("250x256x128", "250x128x256", "250x256x512", "250x128x1024", "1000x128x256")
CPU_SHAPES = ("100x32x64", "100x32x128", "100x128x256", "250x32x128")
Run = Callable[[], object]


class Layer(nn.Module):
    """A recurrent layer that starts anew at every call."""

    def __init__(self, hidden: int, backend: str) -> None:
        super().__init__()
        self.layer = RLIF(hidden, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        output: Tensor = self.layer(x)
        return output


def torch_rnn(hidden: int) -> nn.Module:
    return nn.RNN(hidden, hidden, bias=False)


def snntorch_leaky(hidden: int) -> nn.Module:
    snntorch = importlib.import_module("snntorch")

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = snntorch.RLeaky(beta=0.5, linear_features=hidden)

        def forward(self, x: Tensor) -> Tensor:
            spikes, membrane = self.neuron.init_rleaky()
            rows = []
            for one in x:
                spikes, membrane = self.neuron(one, spikes, membrane)
                rows.append(spikes)
            return torch.stack(rows)

    return Loop()


def training(call: nn.Module, x: Tensor, weight: Tensor) -> Run:
    leaf = x.clone().requires_grad_()

    def run() -> None:
        output = call(leaf)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(weight)
        leaf.grad = None

    return run


def inference(call: nn.Module, x: Tensor) -> Run:
    def run() -> None:
        with torch.no_grad():
            call(x)

    return run


def measured(shape: str, dtype: torch.dtype, device: torch.device, rounds: int) -> list[list[str]]:
    steps, batch, hidden = map(int, shape.split("x"))
    x = torch.randn(steps, batch, hidden, device=device).to(dtype)
    weight = torch.randn_like(x)
    layers: dict[str, nn.Module] = {"ours": Layer(hidden, "auto"), "loop": Layer(hidden, "torch")}
    if importlib.util.find_spec("snntorch") is not None:
        layers["snnTorch RLeaky"] = snntorch_leaky(hidden)
    layers["nn.RNN"] = torch_rnn(hidden)
    for layer in layers.values():
        layer.to(device, dtype)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in layers}
    runs = {name: (inference(layer, x), training(layer, x, weight)) for name, layer in layers.items()}
    if device.type == "cuda":
        found["loop in a CUDA graph"] = ([], [])
        loop = layers["loop"]
        runs["loop in a CUDA graph"] = (graphed(inference(loop, x)), graphed(training(loop, x, weight)))
    for _ in range(rounds):
        for name, (forward, both) in runs.items():
            found[name][0].append(milliseconds(forward, device))
            found[name][1].append(milliseconds(both, device))
    base = [statistics.median(times) for times in found["ours"]]
    rows = []
    for name, times in found.items():
        forward_ms, training_ms = map(statistics.median, times)
        rows.append(
            [
                shape,
                str(dtype).removeprefix("torch."),
                name,
                f"{forward_ms:.2f}",
                f"{1e3 * forward_ms / steps:.1f}",
                f"{training_ms:.2f}",
                f"{forward_ms / base[0]:.2f}",
                f"{training_ms / base[1]:.2f}",
            ]
        )
    return rows


def main(shapes: list[str], dtypes: list[str], rounds: int, threads: int | None, path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    rows = []
    for shape in shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES):
        for dtype in dtypes or (["float32", "bfloat16"] if device.type == "cuda" else ["float32"]):
            rows += measured(shape, getattr(torch, dtype), device, rounds)
    times = ("forward, ms", "a step, µs", "training, ms", "forward / ours", "training / ours")
    head = ("T x B x H", "dtype", "layer", *times)
    lines = [
        "# Recurrent LIF",
        "",
        f"`python benchmarks/recurrence.py`. {where(device)}",
        f"Threads of torch's: {torch.get_num_threads()}; load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "`ours`: one kernel for each pointwise stage and a library's product at every step, launched from Python.",
        "",
        *table(head, rows),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recurrence.md")
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    main(options.shapes, options.dtypes, options.rounds, options.threads, options.output)
