"""Times of recurrent layers in thread-block clusters, of kernels without clusters and of cuDNN, in CUDA graphs.

    python benchmarks/clusters.py [--output FILE] [--seconds 240] [--only NAME ...] [--shapes ...]
        [--dtypes float32 bfloat16] [--steps] [--lock FILE] [--together 1]

A shape is T x batch x neurons. A figure is the median time of replayed graphs. The graphs are a forward in inference,
whose time is divided by T, and a training step: a forward, and a backward that computes the gradients of the input and
the matrices from a random gradient. "Two parts" means that each float32 factor of a product is split into two parts, as
`torch.set_float32_matmul_precision("high")` allows. Two parts have 16 significant bits, while TF32 has 11. `--steps`
adds launches step by step. If several processes have the same `--lock`, only one of them measures at a time, after
`--together` processes have compiled their kernels. The script needs a GPU that supports clusters.
`cluster_divisions.py` compares divisions of a step, and `first_step.py` measures first training steps.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import capture_graph, describe_machine, milliseconds, publish, table
from recurrence import Gates, GRUCell, Layer, LSTMCell, Run, make_inference, make_training_step
from torch import Tensor, nn


class SLSTMCell(nn.Module):
    """One head of an sLSTM, with exponential gates. cuDNN has no such cell."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.V = nn.Parameter(nn.Linear(hidden, 4 * hidden).weight.detach().clone())

    def forward(
        self, i: Tensor, f: Tensor, z: Tensor, o: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
    ) -> tuple[Tensor, ...]:
        p, q, r, s = nn.functional.linear(h, self.V).chunk(4, -1)
        forget = nn.functional.logsigmoid(f + q) + m
        m = torch.maximum(forget, i + p)
        gain, forget = torch.exp(i + p - m), torch.exp(forget - m)
        c, n = forget * c + gain * torch.tanh(z + r), forget * n + gain
        h = torch.sigmoid(o + s) * c / torch.clamp(n, min=1e-3)
        return h, h, c, n, m


SHAPES = ("250x128x256", "1000x128x256", "250x256x512", "250x128x1024", "250x256x128")
OURS: dict[str, Callable[[int], nn.Module]] = {
    "RLIF": lambda hidden: Layer(hidden, "auto"),
    "GRU": lambda hidden: Gates(hidden, GRUCell(hidden), 3, 1),
    "LSTM": lambda hidden: Gates(hidden, LSTMCell(hidden), 4, 2),
    "sLSTM": lambda hidden: Gates(hidden, SLSTMCell(hidden), 4, 4),
}
CUDNN: dict[str, Callable[[int], nn.Module]] = {
    "RLIF": lambda hidden: nn.RNN(hidden, hidden, bias=False),
    "GRU": lambda hidden: nn.GRU(hidden, hidden, bias=False),
    "LSTM": lambda hidden: nn.LSTM(hidden, hidden, bias=False),
}
DEVICE = torch.device("cuda")
_MOST_SECONDS = 60.0  # time limit for the compilation in other processes


class PreparedLayer:
    """A layer and its data of one shape, as a function for the forward and a function for a training step."""

    def __init__(self, layer: nn.Module, shape: str, dtype: torch.dtype) -> None:
        steps, batch, hidden = map(int, shape.split("x"))
        torch.manual_seed(0)
        x = torch.randn(steps, batch, hidden, device=DEVICE).to(dtype)
        layer = layer.to(DEVICE, dtype)
        self.layer: Any = layer
        self.steps = steps
        self.forward: Run = make_inference(layer, x)
        self.training: Run = make_training_step(layer, x, torch.randn_like(x))

    def measure(self) -> tuple[str, str]:
        """Returns the microseconds per step of the forward, and the milliseconds of a training step."""
        gc.collect()  # frees earlier autograd graphs, whose leaf nodes belong to other streams
        forward_ms = milliseconds(capture_graph(self.forward), DEVICE, warmup=5, rep=60)
        training_ms = milliseconds(capture_graph(self.training), DEVICE, warmup=5, rep=80)
        return f"{1e3 * forward_ms / self.steps:.2f}", f"{training_ms:.3f}"


@contextmanager
def measure_alone(lock: Path | None, together: int = 1) -> Iterator[None]:
    """Waits until `together` processes with this lock have compiled their kernels and no other process measures, and
    then prevents the other processes from measuring.
    """
    if lock is None:
        yield
        return
    lock.with_name(f"{lock.name}.{os.getpid()}").touch()
    began = time.perf_counter()
    while len(list(lock.parent.glob(f"{lock.name}.*"))) < together and time.perf_counter() - began < _MOST_SECONDS:
        time.sleep(0.05)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def switch_off(variable: str) -> Iterator[None]:
    os.environ[variable] = "0"
    yield
    del os.environ[variable]


def set_tf32(allowed: bool) -> AbstractContextManager[object]:
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed)


@contextmanager
def allow_two_parts() -> Iterator[None]:
    """Sets PyTorch's precision of float32 products to "high", which allows products in two parts or in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def list_ways(
    name: str, dtype: torch.dtype, *, steps: bool
) -> Iterator[tuple[str, bool, AbstractContextManager[object]]]:
    """Yields each way to run a layer: its name, True if it belongs to this project, and the context of its runs."""
    yield "ours", True, contextlib.nullcontext()
    yield "ours without clusters", True, switch_off("FLEXSN_CLUSTERS")
    if steps:
        yield "ours, step by step", True, switch_off("FLEXSN_ONE_LAUNCH")
    if dtype == torch.float32:
        yield "ours, two parts", True, allow_two_parts()
    if name not in CUDNN:
        return
    if dtype == torch.float32:
        yield "cuDNN, TF32", False, set_tf32(True)
    yield "cuDNN" + (", float32" if dtype == torch.float32 else ""), False, set_tf32(False)


def prepare_layers(name: str, shape: str, dtype: torch.dtype, *, steps: bool) -> list[PreparedLayer]:
    """Returns the layer for each way to run it, after a training step and a forward, which compile its kernels."""
    hidden = int(shape.split("x")[2])
    layers = []
    for _, is_ours, within in list_ways(name, dtype, steps=steps):
        with within:
            layer = PreparedLayer((OURS if is_ours else CUDNN)[name](hidden), shape, dtype)
            layer.training()
            layer.forward()
        layers.append(layer)
    return layers


def main(
    only: list[str],
    shapes: list[str],
    dtypes: list[str],
    seconds: float,
    path: Path,
    lock: Path | None,
    together: int,
    *,
    steps: bool,
) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    work: list[tuple[list[str], torch.dtype, list[PreparedLayer]]] = []
    for name, dtype_name, shape in itertools.product(only or list(OURS), dtypes, shapes):
        dtype = getattr(torch, dtype_name)
        try:
            work.append(([name, shape, dtype_name], dtype, prepare_layers(name, shape, dtype, steps=steps)))
        except Exception as error:
            missing.append(f"{name}, {shape}, {dtype_name}: {str(error).splitlines()[0][:160]}")
    with measure_alone(lock, together):
        for labels, dtype, layers in work:
            for (way, _, within), layer in zip(list_ways(labels[0], dtype, steps=steps), layers, strict=True):
                if time.perf_counter() - begun > seconds:
                    missing.append(f"{', '.join(labels)}, {way}: no time was left")
                    continue
                with within:
                    rows.append([*labels, way, *layer.measure()])
                print(rows[-1], flush=True)
    header = ["layer", "T x B x H", "dtype", "by", "forward, µs a step", "training step, ms"]
    lines = [
        "# Recurrent layers in clusters",
        "",
        f"`python benchmarks/clusters.py`. {describe_machine(DEVICE)}",
        "",
        *table(header, rows),
        "",
        *(f"- not measured: {reason}" for reason in missing),
    ]
    publish(lines, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "clusters.md")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", nargs="*", default=[], choices=list(OURS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--together", type=int, default=1)
    options = parser.parse_args()
    main(
        options.only,
        options.shapes,
        options.dtypes,
        options.seconds,
        options.output,
        options.lock,
        options.together,
        steps=options.steps,
    )
