"""Times of recurrent LIF neurons: one launch for all steps, compared with loops over time and with cuDNN.

    python benchmarks/recurrence.py [--output FILE] [--shapes 250x256x128 ...] [--dtypes ...] [--only NAME ...]
        [--seconds 180]

A shape is T x batch x neurons. A training step is a forward, and a backward that computes the gradients of the input
and the matrix from a random gradient. A training step is measured twice: in the default mode, in which the backward
runs in a thread of autograd, and with forward and backward in one thread. This project's layer and the loop are also
captured in a CUDA graph. A further row is a loop whose step Inductor compiles, in a CUDA graph. nn.RNN, Norse and
SpikingJelly's container also multiply the input by a matrix. cuDNN rounds float32 to TF32, unless TF32 is switched off.
The list below the table names missing libraries. A figure is the median wall time of a few successive calls. After
`--seconds`, no further measurement starts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import capture_graph, describe_machine, publish, table
from torch import Tensor, nn

from flexsn_nn import RLIF, FlexSN, surrogate
from flexsn_runtime import launcher_in_words

GPU_SHAPES = ("250x256x128", "250x128x256", "250x256x512", "250x128x1024", "1000x128x256")
CPU_SHAPES = ("100x32x64", "100x32x128")
Run = Callable[[], object]


class Layer(nn.Module):
    """A recurrent layer that starts each call from its initial states."""

    def __init__(self, hidden: int, backend: str) -> None:
        super().__init__()
        self.layer = RLIF(hidden, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        output: Tensor = self.layer(x)
        return output


class Compiled(nn.Module):
    """A loop over time whose step is compiled by Inductor."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(hidden, hidden).weight.detach().clone())
        spike = surrogate.ATan()

        def step(x: Tensor, s: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            h = v + (x + nn.functional.linear(s, weight) - v) / 2
            s = spike(h - 1)
            return s, h * (1 - s)

        self.step = torch.compile(step, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        s = v = torch.zeros_like(x[0])
        rows = []
        for frame in x.unbind(0):
            s, v = self.step(frame, s, v, self.weight)
            rows.append(s)
        return torch.stack(rows)


class Peer(nn.Module):
    """A cell of another library in a loop. `start()` returns the first states, and `cell(x, states)` returns the output
    and new states.
    """

    def __init__(self, cell: nn.Module, call: Callable[[Tensor, Any], tuple[Tensor, Any]], start: Run) -> None:
        super().__init__()
        self.cell = cell
        self._call, self._start = call, start

    def forward(self, x: Tensor) -> Tensor:
        states, rows = self._start(), []
        for frame in x.unbind(0):
            spikes, states = self._call(frame, states)
            rows.append(spikes)
        return torch.stack(rows)


def make_snntorch(hidden: int) -> nn.Module:
    cell = importlib.import_module("snntorch").RLeaky(beta=0.5, linear_features=hidden)

    def call(x: Tensor, states: Any) -> tuple[Tensor, Any]:
        states = cell(x, *states)
        return states[0], states

    return Peer(cell, call, cell.init_rleaky)


def make_spikingjelly(hidden: int) -> nn.Module:
    base = importlib.import_module("spikingjelly.activation_based")
    importlib.import_module("spikingjelly.activation_based.layer")
    neuron = importlib.import_module("spikingjelly.activation_based.neuron")
    functional = importlib.import_module("spikingjelly.activation_based.functional")
    cell = base.layer.LinearRecurrentContainer(neuron.LIFNode(), hidden, hidden, bias=False)
    return Peer(cell, lambda x, _: (cell(x), None), lambda: functional.reset_net(cell))


def make_norse(hidden: int) -> nn.Module:
    cell = importlib.import_module("norse.torch.module.lif").LIFRecurrentCell(hidden, hidden)
    return Peer(cell, cell, lambda: None)


class GRUCell(nn.Module):
    """A GRU cell with the formula of cuDNN, without biases."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.V = nn.Parameter(nn.Linear(hidden, 3 * hidden).weight.detach().clone())

    def forward(self, r: Tensor, z: Tensor, n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = nn.functional.linear(h, self.V).chunk(3, -1)
        z = torch.sigmoid(z + b)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + a) * c) + z * h
        return h, h


class LSTMCell(nn.Module):
    """An LSTM cell without biases."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.V = nn.Parameter(nn.Linear(hidden, 4 * hidden).weight.detach().clone())

    def forward(self, i: Tensor, f: Tensor, g: Tensor, o: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        p, q, r, s = nn.functional.linear(h, self.V).chunk(4, -1)
        c = torch.sigmoid(f + q) * c + torch.sigmoid(i + p) * torch.tanh(g + r)
        h = torch.sigmoid(o + s) * torch.tanh(c)
        return h, h, c


class Gates(nn.Module):
    """A gated layer: a product of the input with a matrix, and the cell over time."""

    def __init__(self, hidden: int, cell: nn.Module, count: int, states: int) -> None:
        super().__init__()
        self.gates = nn.Linear(hidden, count * hidden, bias=False)
        self.layer, self.count = FlexSN(cell, num_inputs=count, num_states=states, num_outputs=1), count

    def forward(self, x: Tensor) -> Tensor:
        self.layer.reset()
        output: Tensor = self.layer(*self.gates(x).chunk(self.count, dim=-1))
        return output


# Layers by name, in the order of measurement. If the name ends with "in a CUDA graph", calls are replayed.
PEERS: dict[str, Callable[[int], nn.Module]] = {
    "ours": lambda hidden: Layer(hidden, "auto"),
    "ours in a CUDA graph": lambda hidden: Layer(hidden, "auto"),
    "nn.RNN": lambda hidden: nn.RNN(hidden, hidden, bias=False),
    "nn.RNN without TF32": lambda hidden: nn.RNN(hidden, hidden, bias=False),
    "loop": lambda hidden: Layer(hidden, "torch"),
    "loop in a CUDA graph": lambda hidden: Layer(hidden, "torch"),
    "snnTorch RLeaky": make_snntorch,
    "SpikingJelly LinearRecurrentContainer": make_spikingjelly,
    "Norse LIFRecurrentCell": make_norse,
    "compiled step in a CUDA graph": Compiled,
    "ours, GRU": lambda hidden: Gates(hidden, GRUCell(hidden), 3, 1),
    "nn.GRU": lambda hidden: nn.GRU(hidden, hidden, bias=False),
    "nn.GRU without TF32": lambda hidden: nn.GRU(hidden, hidden, bias=False),
    "ours, LSTM": lambda hidden: Gates(hidden, LSTMCell(hidden), 4, 2),
    "nn.LSTM": lambda hidden: nn.LSTM(hidden, hidden, bias=False),
    "nn.LSTM without TF32": lambda hidden: nn.LSTM(hidden, hidden, bias=False),
}


def make_training_step(call: nn.Module, x: Tensor, weight: Tensor) -> Run:
    leaf = x.clone().requires_grad_()
    leaves = [leaf, *(p for p in call.parameters() if p.requires_grad)]

    def run() -> None:
        output = call(leaf)
        output = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(output, leaves, weight, allow_unused=True)

    return run


def make_inference(call: nn.Module, x: Tensor) -> Run:
    def run() -> None:
        with torch.no_grad():
            call(x)

    return run


def measure_seconds(run: Run, device: torch.device) -> float:
    """Returns the seconds of one call, as the median over three batches of successive calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def time_batch(count: int) -> float:
        wait()
        begun = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return (time.perf_counter() - begun) / count

    count = max(1, min(20, int(0.03 / time_batch(1))))
    return statistics.median(time_batch(count) for _ in range(3))


def measure_kernel(run: Run, num_steps: int) -> str:
    """Returns the microseconds of the kernel over all steps, divided by the number of steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if "_loop_" in e.key]
    return f"{events[0].self_device_time_total / events[0].count / num_steps:.2f}" if events else ""


class Times(NamedTuple):
    """Measured times of a layer.

    The fields are the seconds of a forward, of a training step, and of a training step in one thread, the µs of the
    kernel per time step, and the seconds of the first training step.
    """

    forward: float
    training: float
    one_thread: float
    kernel: str = ""
    first: str = ""

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.forward, self.training, self.one_thread


def measure_layer(name: str, shape: str, dtype: torch.dtype, device: torch.device) -> Times:
    steps, batch, hidden = map(int, shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(steps, batch, hidden, device=device).to(dtype)
    layer = PEERS[name](hidden).to(device, dtype)
    forward, train = make_inference(layer, x), make_training_step(layer, x, torch.randn_like(x))
    kernel = first = ""
    if "CUDA graph" in name:
        replayed = measure_seconds(capture_graph(train), device)
        return Times(measure_seconds(capture_graph(forward), device), replayed, replayed)
    begun = time.perf_counter()
    train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if name == "ours":
        first = f"{time.perf_counter() - begun:.1f}"
        forward()
        kernel = measure_kernel(forward, steps) if device.type == "cuda" else ""
    for _ in range(4):  # this project records these calls, and replays them later
        forward()
        train()
    training_time = measure_seconds(train, device)
    with torch.autograd.set_multithreading_enabled(False):
        return Times(measure_seconds(forward, device), training_time, measure_seconds(train, device), kernel, first)


def main(shapes: list[str], dtypes: list[str], only: list[str], seconds: float, path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # This import takes seconds. Without this line, fake tensors would import Dynamo in the first step.
    importlib.import_module("torch._dynamo")
    shapes = shapes or list(GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    dtypes = dtypes or (["bfloat16", "float32"] if device.type == "cuda" else ["float32"])
    begun, missing = time.perf_counter(), list[str]()
    times_by_key: dict[tuple[str, str, str], Times] = {}
    for name in PEERS:
        if ("CUDA graph" in name and device.type != "cuda") or (only and name not in ("ours", *only)):
            continue
        for dtype in dtypes:
            if dtype != "float32" and "TF32" in name:
                continue
            for shape in shapes:
                if time.perf_counter() - begun > seconds:
                    missing.append(f"{name}, {shape}, {dtype}: no time was left")
                    continue
                try:
                    with torch.backends.cudnn.flags(enabled=True, allow_tf32="TF32" not in name):
                        times_by_key[shape, dtype, name] = measure_layer(name, shape, getattr(torch, dtype), device)
                    print(shape, dtype, name, times_by_key[shape, dtype, name], flush=True)
                except ImportError as error:
                    missing.append(f"{name}: {error}")
                except Exception as error:  # other libraries may raise any error, and the rest is still measured
                    missing.append(f"{name}, {shape}, {dtype}: {str(error).splitlines()[0][:160]}")
    rows = []
    for shape in shapes:
        for dtype in dtypes:
            base = times_by_key.get((shape, dtype, "ours"))
            for name in PEERS:
                times_of_layer = times_by_key.get((shape, dtype, name))
                if times_of_layer is not None and base is not None:
                    forward, *both = (f"{1e3 * seconds:.2f}" for seconds in times_of_layer.seconds)
                    ratios = [
                        f"{theirs / ours:.2f}"
                        for theirs, ours in zip(times_of_layer.seconds, base.seconds, strict=True)
                    ]
                    rows.append(
                        [shape, dtype, name, forward, times_of_layer.kernel, *both, *ratios, times_of_layer.first]
                    )
    measurements = ("forward", "training", "in one thread")
    times = (
        *("forward, ms", "kernel, µs a step", "training, ms", "in one thread, ms"),
        *(f"{measurement} / ours" for measurement in measurements),
        "first, s",
    )
    lines = [
        "# Recurrent LIF",
        "",
        f"`python benchmarks/recurrence.py`. {describe_machine(device)}",
        f"This project's calls are launched by: {launcher_in_words(device)}.",
        f"Threads of torch: {torch.get_num_threads()}; load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "On a GPU, `ours` has one launch for all steps of a forward, and one for all steps of a backward. `first`: "
        "seconds of the first training step, including the compilation of kernels, after an import of Dynamo.",
        "",
        *table(("T x B x H", "dtype", "layer", *times), rows),
        "",
        *(f"- not measured: {measurement}" for measurement in dict.fromkeys(missing)),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recurrence.md")
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[], choices=list(PEERS), help="only these peers, and ours")
    parser.add_argument("--seconds", type=float, default=180.0)
    os.environ.setdefault("FLEXSN_LAUNCHER", "compiled")
    options = parser.parse_args()
    main(options.shapes, options.dtypes, options.only, options.seconds, options.output)
