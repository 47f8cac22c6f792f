"""Training on long sequences: seconds of an epoch of examples/long_sequence.py, by what runs its neurons.

    python benchmarks/long_training.py [--output FILE] [--device cuda] [--batches 4] [--seconds 60]

`serial` are kernels without segments of time. A batch of the loop and of snnTorch takes as long as many of ours: where
an epoch would take longer than a fourth of `--seconds`, one batch is measured and multiplied, and the table says so.
On the CPU, seconds are those that the process computes, in one thread: other processes do not lengthen them by waiting.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import publish, synchronize, table, where
from torch import Tensor, nn

from flexsn_nn import FlexSN
from flexsn_runtime.plans._segments import using_segments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
example: Any = importlib.import_module("long_sequence")

WARM = 6  # batches in which kernels are compiled and warm-ups are learned


class Leaky(nn.Module):
    """snnTorch's neuron, step by step: `[T, B, H]` to spikes."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        snntorch = importlib.import_module("snntorch")
        decay = 1.0 - torch.sigmoid(next(hidden.parameters()).detach())
        surrogate = snntorch.surrogate.atan()
        self.leaky = snntorch.Leaky(decay, learn_beta=True, spike_grad=surrogate, reset_mechanism="zero")

    def forward(self, currents: Tensor) -> Tensor:
        membrane = self.leaky.init_leaky()
        spikes = []
        for current in currents:
            spike, membrane = self.leaky(current, membrane)
            spikes.append(spike)
        return torch.stack(spikes)


def ours(classes: int, backend: str) -> nn.Module:
    network: nn.Module = example.Network(classes, backend)
    return network


def peer(classes: int) -> nn.Module:
    network: nn.Module = example.Network(classes, neuron=Leaky(example.Network(classes).hidden))
    return network


def epoch(network: nn.Module, data: Any, seconds: float, warm: int) -> tuple[float, bool]:
    """Seconds of an epoch, and whether all its batches were run.

    Args:
        seconds: that it may take.
        warm: batches before.
    """
    optimizer = example.optimizer_of(network)
    device = data.train_x.device
    batches = torch.arange(len(data.train_x), device=device).split(example.BATCH)

    def run(batch: Tensor) -> None:
        example.train_step(network, optimizer, data.train_x[batch], data.train_y[batch])

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(warm):
        run(batches[0])
        synchronize(device)
    begun = clock()
    run(batches[0])
    synchronize(device)
    one = clock() - begun
    if one * len(batches) > seconds:
        return one * len(batches), False
    begun = clock()
    for batch in batches:
        run(batch)
    synchronize(device)
    return clock() - begun, True


def ways(device: torch.device) -> dict[str, tuple[Callable[[int], nn.Module], AbstractContextManager[None], int]]:
    """By name: a network, the rule of its segments, and how many batches it is warmed up with."""
    kernels = "triton" if device.type == "cuda" else "cpp"
    found: dict[str, tuple[Callable[[int], nn.Module], AbstractContextManager[None], int]] = {
        "kernels": (lambda classes: ours(classes, kernels), nullcontext(), WARM),
        "serial": (lambda classes: ours(classes, kernels), using_segments(None), WARM),
        "loop": (lambda classes: ours(classes, "torch"), nullcontext(), 0),
    }
    if importlib.util.find_spec("snntorch") is not None:
        found["snnTorch"] = (peer, nullcontext(), 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, default=8, help="of an epoch of waves")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all epochs together, but for warming up")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    output = chosen.output or results / f"long_training{'' if device.type == 'cuda' else '_cpu'}.md"
    samples = chosen.batches * example.BATCH
    tasks = {
        "pixel by pixel": example.pixels(2000, 0).to(device),
        "raw audio": example.waves(samples, example.RATE, 0).to(device),
    }
    rows: list[list[str]] = []
    has_snntorch = importlib.util.find_spec("snntorch") is not None
    lines = [
        "# Training on long sequences",
        "",
        f"`python benchmarks/long_training.py --device {device.type}`: seconds of an epoch of",
        f"examples/long_sequence.py, {example.BATCH} sequences a batch and {example.HIDDEN} neurons, in eager mode.",
        "`serial`: kernels that walk all steps one after the other. `~`: one batch was measured and multiplied."
        + (" Seconds that one thread computes." if device.type == "cpu" else "")
        + ("" if has_snntorch else " snnTorch was not installed."),
        where(device),
        "",
    ]
    for name, data in tasks.items():
        row = [name, str(data.train_x.shape[1]), str(len(data.train_x))]
        for make, rule, warm in ways(device).values():
            torch.manual_seed(0)
            with rule:
                network = make(data.classes).to(device)
                took, whole = epoch(network, data, float("inf") if warm else chosen.seconds / 4, warm)
                if row[3:] == []:
                    assert isinstance(network.hidden, FlexSN)
                    told = network.hidden.explain()
                    segments = [line.split(": ", 1)[1] for line in told.splitlines() if "side by side" in line]
            row.append(f"{'' if whole else '~'}{took:.3g}")
            print(row, flush=True)
        rows.append([*row, "; ".join(segments) or "none"])
        header = ["task", "steps", "sequences", *ways(device), "segments"]
        publish([*lines, *table(header, rows)], output)


if __name__ == "__main__":
    main()
