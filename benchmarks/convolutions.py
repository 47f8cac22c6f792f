"""Recurrent convolutions: ConvLSTM and a recurrent spiking convolution, compared with the loop over time.

    python benchmarks/convolutions.py [--output FILE] [--shape 50x32x32x32x32] [--seconds 60]

A shape is T x batch x channels x height x width. "Loop" is the same core with `backend="torch"`: PyTorch's operations
in a loop over time. A training step is a forward, and a backward that computes the gradients of the input and the
weights from a random gradient. "Convolutions alone" are the calls of library convolutions that a layer needs, with
nothing between them. Their time is a lower bound for every implementation that calls these convolutions. A figure is
the median time in ms, either of eager calls or of replays of a CUDA graph. "bfloat16" means that the layer runs under
autocast, and "channels last" that inputs and weights have this memory format.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from measure import capture_graph, describe_machine, milliseconds, publish, table
from torch import Tensor, nn

from flexsn_nn import FlexSN, surrogate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[[], object]


class ConvLSTM(nn.Module):
    """One step of a ConvLSTM."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.of_input = nn.Conv2d(channels, 4 * channels, 3, padding=1)
        self.of_state = nn.Conv2d(channels, 4 * channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (self.of_input(x) + self.of_state(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c


class Spiking(nn.Module):
    """One step of a LIF neuron whose spikes are fed back through a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.spike = nn.Conv2d(channels, channels, 3, padding=1), surrogate.ATan()

    def forward(self, x: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x + self.conv(s) - v) / 2
        s = self.spike(h - 1)
        return s, s, h * (1 - s)


CORES: dict[str, Callable[[int], nn.Module]] = {"ConvLSTM": ConvLSTM, "spiking convolution": Spiking}


class Layer(nn.Module):
    """A layer that starts each call from its initial states."""

    def __init__(self, core: nn.Module, backend: Literal["auto", "torch"]) -> None:
        super().__init__()
        self.layer = FlexSN(core, num_inputs=1, num_states=2, num_outputs=1, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        output: Tensor = self.layer(x)
        return output


def autocast(dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(DEVICE.type, torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()


def measure_convolutions(core: nn.Module, x: Tensor, dtype: torch.dtype) -> list[str]:
    """Returns the times of the library convolutions that a layer calls, without the rest of the layer.

    The convolutions of the input, and the convolutions for gradients of weights, run for all steps at once. The
    convolutions of the state run step by step.
    """
    steps, frames = len(x), x.detach().flatten(0, 1).to(dtype)
    convolutions = [m for m in core.modules() if isinstance(m, nn.Conv2d)]
    weights = [m.weight.detach().to(dtype) for m in convolutions]
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    grads = [torch.randn_like(torch.convolution(frames, w, None, *settings)) for w in weights]
    step_operands = (frames[: x.shape[1]], grads[-1][: x.shape[1]])

    def forward() -> None:
        for w in weights[:-1]:
            torch.convolution(frames, w, None, *settings)
        for _ in range(steps):
            torch.convolution(step_operands[0], weights[-1], None, *settings)

    def train() -> None:
        forward()
        backward = torch.ops.aten.convolution_backward.default
        for _ in range(steps):
            backward(step_operands[1], step_operands[0], weights[-1], None, *settings, [True, False, False])
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            backward(g, frames, w, None, *settings, [i + 1 < len(weights), True, False])

    return measure_runs([forward, train])


def measure_layer(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> list[str]:
    """Returns the times of a forward and of a training step, called eagerly and from a graph."""
    leaf, weight = x.clone().requires_grad_(), torch.randn_like(x)
    leaves = [leaf, *layer.parameters()]

    def forward() -> None:
        with torch.no_grad(), autocast(dtype):
            layer(x)

    def train() -> None:
        with autocast(dtype):
            output = layer(leaf)
        torch.autograd.grad(output, leaves, weight.to(output.dtype))

    return measure_runs([forward, train])


def measure_runs(runs: Sequence[Run]) -> list[str]:
    """Returns the milliseconds of each run, called eagerly and from a graph."""
    cells = []
    for run in runs:
        cells.append(f"{milliseconds(run, DEVICE, warmup=1, rep=40):.2f}")
        gc.collect()
        try:
            cells.append(
                f"{milliseconds(capture_graph(run), DEVICE, warmup=1, rep=40):.2f}" if DEVICE.type == "cuda" else ""
            )
        except RuntimeError as error:
            cells.append(str(error).splitlines()[0][:40])
    return cells


def main(shape: str, seconds: float, path: Path) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    size = tuple(map(int, shape.split("x")))
    for (name, core), last, dtype in product(CORES.items(), (False, True), (torch.float32, torch.bfloat16)):
        for backend, name_of_backend in (("auto", "ours"), ("torch", "loop")):
            description = str(dtype).removeprefix("torch.") + (", channels last" if last else "")
            if time.perf_counter() - begun > seconds:
                missing.append(f"{name}, {description}, {name_of_backend}: no time was left")
                continue
            torch.manual_seed(0)
            layer = Layer(core(size[2]), "auto" if backend == "auto" else "torch").to(DEVICE)
            x = torch.randn(size, device=DEVICE)
            if last:
                layer = layer.to(memory_format=torch.channels_last)
                x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(size)
            rows.append([name, description, name_of_backend, *measure_layer(layer, x, dtype)])
            print(rows[-1], f"{time.perf_counter() - begun:.0f} s", flush=True)
            if backend == "auto":
                rows.append([name, description, "convolutions alone", *measure_convolutions(layer, x, dtype)])
                print(rows[-1], flush=True)
            del layer
            gc.collect()
    lines = [
        f"# Recurrent convolutions, {shape}",
        "",
        f"`python benchmarks/convolutions.py`. {describe_machine(DEVICE)}",
        "",
        *table(["layer", "dtype", "by", "forward", "forward in a graph", "training", "training in a graph"], rows),
        "",
        *(f"- not measured: {reason}" for reason in missing),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "convolutions.md")
    parser.add_argument("--shape", default="50x32x32x32x32")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    main(options.shape, options.seconds, options.output)
