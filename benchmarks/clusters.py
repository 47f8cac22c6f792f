"""Recurrent layers in thread-block clusters, compared with kernels without them and with cuDNN, in CUDA graphs.

    python benchmarks/clusters.py [--output FILE] [--seconds 240] [--only NAME ...] [--shapes ...]
        [--dtypes float32 bfloat16] [--steps] [--lock FILE]

A shape is T x batch x neurons. A figure is the median time of replayed graphs: of a forward in inference, per step, and
of a training step, which is the forward and the backward of a random gradient to the input and the matrices.
`--steps` adds launches step by step. Of several processes with one `--lock`, one measures at a time. The script needs a
GPU with clusters. `cluster_divisions.py` compares divisions of a step.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import graphed, milliseconds, publish, table, where
from recurrence import Gates, GRUCell, Layer, LSTMCell, Run, inference, training
from torch import nn

SHAPES = ("250x128x256", "1000x128x256", "250x256x512", "250x128x1024", "250x256x128")
OURS: dict[str, Callable[[int], nn.Module]] = {
    "RLIF": lambda hidden: Layer(hidden, "auto"),
    "GRU": lambda hidden: Gates(hidden, GRUCell(hidden), 3, 1),
    "LSTM": lambda hidden: Gates(hidden, LSTMCell(hidden), 4, 2),
}
CUDNN: dict[str, Callable[[int], nn.Module]] = {
    "RLIF": lambda hidden: nn.RNN(hidden, hidden, bias=False),
    "GRU": lambda hidden: nn.GRU(hidden, hidden, bias=False),
    "LSTM": lambda hidden: nn.LSTM(hidden, hidden, bias=False),
}
DEVICE = torch.device("cuda")


class Made:
    """A layer on data of one shape: its forward, and a training step."""

    def __init__(self, layer: nn.Module, shape: str, dtype: torch.dtype) -> None:
        steps, batch, hidden = map(int, shape.split("x"))
        torch.manual_seed(0)
        x = torch.randn(steps, batch, hidden, device=DEVICE).to(dtype)
        layer = layer.to(DEVICE, dtype)
        self.layer: Any = layer
        self.steps = steps
        self.forward: Run = inference(layer, x)
        self.training: Run = training(layer, x, torch.randn_like(x))

    def times(self, lock: Path | None) -> tuple[str, str]:
        """Returns microseconds a step of the forward, and ms of a training step."""
        self.forward()  # compiles
        self.training()
        with alone(lock):
            gc.collect()  # collects earlier graphs, whose nodes of leaves have other streams
            forward = milliseconds(graphed(self.forward), DEVICE, warmup=2, rep=15)
            both = milliseconds(graphed(self.training), DEVICE, warmup=2, rep=15)
        return f"{1e3 * forward / self.steps:.2f}", f"{both:.3f}"


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds the lock, so that no other process with this lock measures at the same time."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def without(variable: str) -> Iterator[None]:
    os.environ[variable] = "0"
    yield
    del os.environ[variable]


def compared(name: str, shape: str, dtype: torch.dtype, lock: Path | None, *, steps: bool) -> list[list[str]]:
    """Returns a row for each way."""
    hidden = int(shape.split("x")[2])
    rows = []
    begun = time.perf_counter()
    made = Made(OURS[name](hidden), shape, dtype)
    made.training()
    torch.cuda.synchronize()
    first = f"{time.perf_counter() - begun:.1f}"
    rows.append(["ours", *made.times(lock), first])
    with without("FLEXSN_CLUSTERS"):
        rows.append(["ours without clusters", *Made(OURS[name](hidden), shape, dtype).times(lock), ""])
    if steps:
        with without("FLEXSN_ONE_LAUNCH"):
            rows.append(["ours, step by step", *Made(OURS[name](hidden), shape, dtype).times(lock), ""])
    for tf32 in (True, False) if dtype == torch.float32 else (True,):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            how = "cuDNN" + ("" if dtype != torch.float32 else ", TF32" if tf32 else ", float32")
            rows.append([how, *Made(CUDNN[name](hidden), shape, dtype).times(lock), ""])
    return rows


def main(
    only: list[str], shapes: list[str], dtypes: list[str], seconds: float, path: Path, lock: Path | None, *, steps: bool
) -> None:
    begun, rows, missing = time.perf_counter(), list[list[str]](), list[str]()
    for name in only or list(OURS):
        for kind in dtypes:
            for shape in shapes:
                dtype = getattr(torch, kind)
                if time.perf_counter() - begun > seconds:
                    missing.append(f"{name}, {shape}, {kind}: no time was left")
                    continue
                try:
                    found = compared(name, shape, dtype, lock, steps=steps)
                except Exception as error:
                    missing.append(f"{name}, {shape}, {kind}: {str(error).splitlines()[0][:160]}")
                    continue
                rows += [[name, shape, kind, *row] for row in found]
                print(*rows[-len(found) :], sep="\n", flush=True)
    header = ["layer", "T x B x H", "dtype", "by", "forward, µs a step", "training step, ms", "first training step, s"]
    lines = [
        "# Recurrent layers in clusters",
        "",
        f"`python benchmarks/clusters.py`. {where(DEVICE)}",
        "",
        *table(header, rows),
        "",
        *(f"- not measured: {what}" for what in missing),
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
    options = parser.parse_args()
    main(
        options.only, options.shapes, options.dtypes, options.seconds, options.output, options.lock, steps=options.steps
    )
