"""Neurons on the CPU: kernels in C++, compared with a copy of the same number of bytes, the loop, compiled chunks of
the loop, and other libraries.

    python benchmarks/cpu_neurons.py [--output benchmarks/results/cpu_neurons.md] [--threads 1] [--shapes 128x8192 ...]

Inference reads the inputs and writes the outputs, so its lower bound is a copy of the same size (two streams). A
training step of a neuron moves at least five streams: the input, the output, the input again, the gradient of the
output, and the gradient of the input. A copy writes into existing memory, as `copy_` does. The compared runs alternate,
and a figure is the median over all runs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from peer_neurons import SnnTorchLeaky, is_installed
from torch import Tensor, nn

from flexsn_nn import ALIF, IF, LIF, FlexSN, Izhikevich
from flexsn_nn.surrogate import ATan, Sigmoid, Surrogate

SHAPES = ("64x262144", "128x8192", "25x128x1000", "4x64x128")
CHUNK = 8
Run = Callable[[], object]


class ChannelPLIF(nn.Module):
    """A LIF step with a learned time constant for each channel. Channels are the last dimension."""

    def __init__(self, channels: int, spike: Surrogate) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, channels))
        self.spike = spike

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * torch.sigmoid(self.w)
        s = self.spike(h - 1.0)
        return s, h * (1.0 - s)


def make_neuron(name: str, spike: Surrogate, channels: int, backend: str) -> FlexSN:
    """Makes the neuron with this name."""
    if name == "PLIF per channel":
        return FlexSN(ChannelPLIF(channels, spike), 1, 1, 1, backend=backend)
    class_by_name: dict[str, Callable[..., FlexSN]] = {"LIF": LIF, "IF": IF, "ALIF": ALIF, "Izhikevich": Izhikevich}
    return class_by_name[name](surrogate_function=spike, backend=backend)


def make_inference(neuron: FlexSN, x: Tensor) -> Run:
    def run() -> None:
        with torch.no_grad():
            neuron.reset()
            neuron(x)

    return run


def make_training_step(neuron: FlexSN, x: Tensor, weight: Tensor) -> Run:
    leaf = x.clone().requires_grad_()

    def run() -> None:
        neuron.reset()
        leaf.grad = None
        output = neuron(leaf)
        assert isinstance(output, Tensor)
        output.backward(weight)

    return run


def compile_chunks(neuron: FlexSN, x: Tensor, weight: Tensor | None) -> Run:
    """Returns a function that loops over chunks of eight steps, which are compiled by `torch.compile`. If `weight` is
    not `None`, the function also runs the backward.
    """

    def run_chunk(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[0]):
            s, v = neuron.core(x[t], v)
            outputs.append(s)
        return torch.stack(outputs), v

    compiled = torch.compile(run_chunk, fullgraph=True, dynamic=False)
    leaf = x.clone().requires_grad_(weight is not None)

    def run() -> None:
        leaf.grad = None
        v, outputs = torch.zeros_like(x[0]), []
        with torch.set_grad_enabled(weight is not None):
            for begin in range(0, x.shape[0], CHUNK):
                output, v = compiled(leaf[begin : begin + CHUNK], v)
                outputs.append(output)
            result = torch.cat(outputs)
        if weight is not None:
            result.backward(weight)

    return run


def list_peers(x: Tensor, weight: Tensor) -> dict[str, Run]:
    """Returns a training step of LIF for each installed library."""
    runs: dict[str, Run] = {}
    leaf = x.clone().requires_grad_()
    if is_installed("spikingjelly"):
        from spikingjelly.activation_based import functional, neuron, surrogate

        jelly = neuron.LIFNode(step_mode="m", surrogate_function=surrogate.ATan())

        def spikingjelly() -> None:
            functional.reset_net(jelly)
            leaf.grad = None
            jelly(leaf).backward(weight)

        runs["SpikingJelly `LIFNode`"] = spikingjelly
    if is_installed("snntorch"):
        leaky = SnnTorchLeaky()

        def snn() -> None:
            leaf.grad = None
            leaky(leaf).backward(weight)

        runs["snnTorch `Leaky`"] = snn
    if is_installed("norse"):
        cells = importlib.import_module("norse.torch").LIF()

        def norse_lif() -> None:
            leaf.grad = None
            cells(leaf)[0].backward(weight)

        runs["Norse `LIF`"] = norse_lif
    return runs


def _find_version(name: str) -> str:
    """Returns the version of the library with which the name of a row begins."""
    library = name.split(" ")[0].lower()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "—"


def measure_medians(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Returns the median time of each run, in milliseconds. The runs alternate, and each run gets about `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles the function
    while any(sum(seconds_of_run) < seconds and len(seconds_of_run) < 200 for seconds_of_run in times.values()):
        for name, run in runs.items():
            if len(times[name]) >= 3 and sum(times[name]) >= seconds:
                continue
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    return {name: 1e3 * statistics.median(seconds_of_run) for name, seconds_of_run in times.items()}


def measure_row(name: str, spike: Surrogate, shape: tuple[int, ...], seconds: float) -> list[object]:
    """Returns a row of the table."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    weight = torch.randn(shape)
    ours, loop = (make_neuron(name, spike, shape[-1], backend) for backend in ("cpp", "torch"))
    target = torch.empty_like(x)
    runs: dict[str, Run] = {
        "copy": lambda: target.copy_(x),
        "inference": make_inference(ours, x),
        "training": make_training_step(ours, x, weight),
        "loop": make_inference(loop, x),
        "loop trains": make_training_step(loop, x, weight),
    }
    if name == "LIF":
        torch._dynamo.reset()  # compiles each size separately
        runs["chunks"] = compile_chunks(loop, x, None)
        runs["chunks train"] = compile_chunks(loop, x, weight)
    ms = measure_medians(runs, seconds)
    copy, infer, train = ms["copy"], ms["inference"], ms["training"]

    def divide(other: str, our_ms: float) -> str:
        return f"{ms[other] / our_ms:.1f}" if other in ms else "—"

    return [
        f"{name}, {type(spike).__name__}",
        "x".join(map(str, shape)),
        f"{copy:.3f}",
        f"{infer:.3f}",
        f"{infer / copy:.2f}",
        f"{train:.3f}",
        f"{train / (2.5 * copy):.2f}",
        divide("loop", infer),
        divide("loop trains", train),
        divide("chunks", infer),
        divide("chunks train", train),
    ]


def main(path: Path, shapes: list[str], threads: int, seconds: float) -> None:
    torch.set_num_threads(threads)
    cases = [(name, ATan()) for name in ("LIF", "IF", "PLIF per channel", "ALIF", "Izhikevich")] + [("LIF", Sigmoid())]
    head = ["neuron", "T x step", "copy, ms", "inference, ms", "/ copy", "training, ms", "/ copy of five streams"]
    head += ["loop / inference", "loop / training", "chunks / inference", "chunks / training"]
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes]
    rows = [measure_row(name, spike, shape, seconds) for shape in sizes for name, spike in cases]
    x = torch.randn(sizes[0])
    weight = torch.randn(sizes[0])
    runs = {
        "ours": make_training_step(make_neuron("LIF", ATan(), sizes[0][-1], "cpp"), x, weight),
        **list_peers(x, weight),
    }
    target = torch.empty_like(x)
    ms = measure_medians({"copy": lambda: target.copy_(x), **runs}, seconds)
    floor = 2.5 * ms.pop("copy")
    peer_rows = [
        (name, _find_version(name), *(f"{t:.1f}" for t in (elapsed, elapsed / ms["ours"], elapsed / floor)))
        for name, elapsed in ms.items()
    ]
    lines = [
        "# Neurons on the CPU",
        "",
        f"`python benchmarks/cpu_neurons.py --threads {threads}`. {describe_machine(torch.device('cpu'))} float32.",
        f"Threads: {threads} of {os.cpu_count()} processors; load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "The floor is the time of `copy_` into existing memory. For inference, it is a copy of the input, and for",
        "training, two and a half times as long. `chunks` is `torch.compile` of eight steps at a time.",
        "",
        *table(head, rows),
        "",
        f"A training step of LIF at {shapes[0]}, float32:",
        "",
        *table(("", "version", "ms", "/ ours", "/ copy of five streams"), peer_rows),
        "",
        "A kernel that reads its input and writes its results takes at least as long as the copy. So the last column",
        "is the largest possible speedup over each library. The neurons of the libraries differ in their formulas and",
        "surrogates. The neurons of other libraries are loops of torch operators.",
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_neurons.md")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.6, help="time per figure")
    arguments = parser.parse_args()
    assert all(math.prod(map(int, shape.split("x"))) > 0 for shape in arguments.shapes)
    main(arguments.output, arguments.shapes, arguments.threads, arguments.seconds)
