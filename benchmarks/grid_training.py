"""Held-out accuracy with weights in float32 and on a grid, for several seeds. The tasks are the digits example, the
evidence example, and MNIST-1D.

    python benchmarks/grid_training.py [--output FILE] [--seeds 5] [--epochs 25] [--bits 16 8] [--device cpu]
        [--task digits evidence mnist1d]

All linear layers use weights on a grid from the first step on. Only the weights that a layer uses are rounded, and not
the parameters that the optimizer updates. The package `mnist1d` makes MNIST-1D (Greydanus and Kobak, "Scaling down deep
learning with MNIST-1D", ICML 2024) without a download: 4,000 sequences of 40 values for training, and 1,000 for the
test. A convolution over time and two recurrent layers of LIF neurons read one value per step.
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
from typing import NamedTuple

import torch
from measure import describe_machine, publish, run_in_processes, table
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import LI, RLIF, graphs, on_grid
from flexsn_nn.functional import reset_net

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TASKS = ("digits", "evidence", "mnist1d")
BATCH = 100


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def put_on_grid(network: nn.Module, bits: int | None) -> nn.Module:
    for layer in network.modules() if bits is not None else ():
        if type(layer) is nn.Linear:
            on_grid(layer, bits=bits)  # type: ignore[arg-type]
    return network


def measure_evidence(evidence: ModuleType, bits: int | None, seed: int, device: torch.device) -> float:
    make = evidence.Network
    evidence.Network = lambda backend: put_on_grid(make(backend), bits)  # type: ignore[attr-defined]
    try:
        return float(evidence.train(True, 300, 60, seed, device).accuracy)
    finally:
        evidence.Network = make  # type: ignore[attr-defined]


def measure_digits(digits: ModuleType, bits: int | None, seed: int, epochs: int, device: torch.device) -> float:
    torch.manual_seed(seed)
    network = put_on_grid(digits.Network(8, "auto").to(device), bits)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, accuracies = digits.train(network, digits.load(device, seed), epochs, seed)
    return float(accuracies[-1])


class Mnist1d(nn.Module):
    """A network that maps sequences `[T, B, 1]` to logarithms of probabilities `[B, 10]`."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 5, padding=2)
        self.hidden = nn.Sequential(RLIF(width, tau=3.0), nn.Linear(width, width), RLIF(width, tau=3.0))
        self.out = nn.Sequential(nn.Linear(width, 10), LI(tau=5.0))

    def forward(self, x: Tensor) -> Tensor:
        currents = self.first(x.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
        potential: Tensor = self.out(self.hidden(currents))
        return potential.softmax(-1).mean(0).log()


def load_mnist1d(device: torch.device) -> list[Tensor]:
    """Returns sequences `[T, samples, 1]` and labels for training, then held-out sequences and labels."""
    data = importlib.import_module("mnist1d.data")
    arrays = data.make_dataset(data.get_dataset_args())
    sequences = [torch.tensor(arrays[name]).float().t()[:, :, None].contiguous() for name in ("x", "x_test")]
    labels = [torch.tensor(arrays[name]) for name in ("y", "y_test")]
    return [tensor.to(device) for pair in zip(sequences, labels, strict=True) for tensor in pair]


def measure_mnist1d(data: list[Tensor], bits: int | None, seed: int, epochs: int, device: torch.device) -> float:
    x, labels, held_out, held_out_labels = data
    torch.manual_seed(seed)
    network = put_on_grid(Mnist1d().to(device), bits)
    rate = torch.tensor(6e-3, device=device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-2, fused=on_gpu, capturable=on_gpu)
    batches = x.shape[1] // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, epochs * batches, cycle_momentum=False)
    step = graphs.capture(network, F.nll_loss, optimizer, max_norm=1.0)  # only on a GPU
    for _ in range(epochs):
        for chosen in torch.randperm(x.shape[1]).to(device).split(BATCH):
            step(x[:, chosen] + 0.02 * torch.randn_like(x[:, chosen]), labels[chosen])
            schedule.step()
    print(step.explain().splitlines()[0], flush=True)
    reset_net(network)
    with torch.no_grad():
        return float((network(held_out).argmax(1) == held_out_labels).float().mean())


class Run(NamedTuple):
    """One training run, in a separate process."""

    task: str
    bits: int | None
    seed: int
    epochs: int
    device: torch.device


def measure_accuracy(run: Run) -> float:
    torch.set_num_threads(1)
    task, bits, seed, epochs, device = run
    if task == "mnist1d":
        return measure_mnist1d(load_mnist1d(device), bits, seed, epochs, device)
    module = load_example(task)
    if task == "digits":
        return measure_digits(module, bits, seed, epochs, device)
    return measure_evidence(module, bits, seed, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "grid_training.md")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 8])
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    lines = ["# Training on a grid", "", describe_machine(arguments.device), ""]
    header = ("weights", "mean", "standard deviation", "each seed")
    for task in arguments.task:
        kinds = (None, *arguments.bits)
        runs = [
            Run(task, bits, seed, arguments.epochs, arguments.device)
            for bits in kinds
            for seed in range(arguments.seeds)
        ]
        accuracies = run_in_processes(measure_accuracy, runs)
        rows = []
        for i, bits in enumerate(kinds):
            accuracies_of_kind = accuracies[i * arguments.seeds : (i + 1) * arguments.seeds]
            name = "float32" if bits is None else f"grid, {bits} bits"
            spread = statistics.stdev(accuracies_of_kind) if len(accuracies_of_kind) > 1 else 0.0
            text = ", ".join(f"{value:.2%}" for value in accuracies_of_kind)
            rows.append((name, f"{statistics.mean(accuracies_of_kind):.2%}", f"{spread:.2%}", text))
        trained = "60 updates" if task == "evidence" else f"{arguments.epochs} epochs"
        lines += [f"Held-out accuracy on {task} after {trained}, of {arguments.seeds} seeds:", ""]
        lines += [*table(header, rows), ""]
        publish(lines, arguments.output)


if __name__ == "__main__":
    main()
