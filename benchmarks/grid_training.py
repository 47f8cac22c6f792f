"""Held-out accuracy of the digits and evidence examples, with weights in float32 and on a grid, over seeds.

    python benchmarks/grid_training.py [--output FILE] [--seeds 5] [--epochs 25] [--bits 16 8] [--device cpu]
        [--task digits evidence]

All linear layers are on a grid from the first step on; what is learned is not rounded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import statistics
import sys
from pathlib import Path
from types import ModuleType

import torch
from measure import publish, table, where
from torch import nn

from flexsn_nn import on_grid

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TASKS = ("digits", "evidence")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def gridded(network: nn.Module, bits: int | None) -> nn.Module:
    for layer in network.modules() if bits is not None else ():
        if type(layer) is nn.Linear:
            on_grid(layer, bits=bits)  # type: ignore[arg-type]
    return network


def evidence_accuracy(evidence: ModuleType, bits: int | None, seed: int, device: torch.device) -> float:
    make = evidence.Network
    evidence.Network = lambda backend: gridded(make(backend), bits)  # type: ignore[attr-defined]
    try:
        return float(evidence.train(True, 300, 60, seed, device).accuracy)
    finally:
        evidence.Network = make  # type: ignore[attr-defined]


def digits_accuracy(digits: ModuleType, bits: int | None, seed: int, epochs: int, device: torch.device) -> float:
    torch.manual_seed(seed)
    network = gridded(digits.Network(8, "auto").to(device), bits)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, accuracies = digits.train(network, digits.load(device, seed), epochs, seed)
    return float(accuracies[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "grid_training.md")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 8])
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    lines = ["# Training on a grid", "", where(arguments.device), ""]
    header = ("weights", "mean", "standard deviation", "each seed")
    for task in arguments.task:
        module, rows = example(task), []
        for bits in (None, *arguments.bits):
            found = [
                digits_accuracy(module, bits, seed, arguments.epochs, arguments.device)
                if task == "digits"
                else evidence_accuracy(module, bits, seed, arguments.device)
                for seed in range(arguments.seeds)
            ]
            name = "float32" if bits is None else f"grid, {bits} bits"
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            each = ", ".join(f"{one:.2%}" for one in found)
            rows.append((name, f"{statistics.mean(found):.2%}", f"{spread:.2%}", each))
        trained = f"{arguments.epochs} epochs" if task == "digits" else "60 updates"
        lines += [f"Held-out accuracy on {task} after {trained}, of {arguments.seeds} seeds:", ""]
        lines += [*table(header, rows), ""]
        publish(lines, arguments.output)


if __name__ == "__main__":
    main()
