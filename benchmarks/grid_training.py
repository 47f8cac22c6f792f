"""Held-out accuracy of the digits example, with weights in float32 and on a grid, over seeds.

    python benchmarks/grid_training.py [--output FILE] [--seeds 5] [--epochs 25] [--bits 16 8] [--device cpu]

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

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    return module


def accuracy(digits: ModuleType, bits: int | None, seed: int, epochs: int, device: torch.device) -> float:
    torch.manual_seed(seed)
    network = digits.Network(8, "auto").to(device)
    if bits is not None:
        for layer in network.modules():
            if type(layer) is nn.Linear:
                on_grid(layer, bits=bits)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, accuracies = digits.train(network, digits.load(device, seed), epochs, seed)
    return float(accuracies[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "grid_training.md")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 8])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    digits = example()
    rows = []
    for bits in (None, *arguments.bits):
        found = [accuracy(digits, bits, seed, arguments.epochs, arguments.device) for seed in range(arguments.seeds)]
        name = "float32" if bits is None else f"grid, {bits} bits"
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        each = ", ".join(f"{one:.2%}" for one in found)
        rows.append((name, f"{statistics.mean(found):.2%}", f"{spread:.2%}", each))
    header = ("weights", "mean", "standard deviation", "each seed")
    lines = ["# Training on a grid: digits", "", where(arguments.device), ""]
    lines += [f"Held-out accuracy after {arguments.epochs} epochs, of {arguments.seeds} seeds:", ""]
    publish([*lines, *table(header, rows)], arguments.output)


if __name__ == "__main__":
    main()
