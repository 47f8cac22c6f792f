"""Accuracy on real data over seeds, with the same network in another library and the numbers that papers give: a table.

    pip install mnist1d snntorch
    python benchmarks/real_data.py [--output FILE] [--only NAME ...] [--seeds 5] [--epochs N] [--device cpu]

Two data sets that a package ships or makes:

- digits: scikit-learn's, 8 x 8 pixels, the first half for training and the second for the test, as scikit-learn's own
  example has it. Each pixel is a current at all 8 steps; two layers of `LIF`.
- mnist1d: 4,000 and 1,000 rows of 40 numbers, made by the package `mnist1d` with its own seed. A row is the current of
  all 8 steps; the three convolutions of its authors' network, each with `Leaky` behind it, and the mean over time of
  what a linear layer makes of the spikes.

Both libraries begin at the same weights and see the same batches. Seconds of an epoch are measured in turns, training
alone, the first epoch left out.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import LIF, Leaky, OverTime, functional, surrogate

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[[Tensor], Tensor]
CHANNELS, BETA = 25, 0.5


@dataclass(frozen=True)
class Data:
    """Inputs `[N, features]` and classes `[N]`."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Task:
    """A data set, its network in both libraries, and what was published.

    Attributes:
        load: the data.
        ours, theirs: modules `[T, B, features] -> [B, classes]`, with parameters of the same shapes and order.
        sequence: `[B, features] -> [T, B, features]`.
        peer: the other library.
        published: numbers of a source, in words.
    """

    load: Callable[[], Data]
    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    sequence: Run
    peer: str
    published: str
    epochs: int
    batch: int
    rate: float
    clip: float


def load_digits() -> Data:
    """scikit-learn's handwritten digits, in halves."""
    from sklearn.datasets import load_digits as load

    found = load()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    half = len(x) // 2
    return Data(x[:half], y[:half], x[half:], y[half:])


def load_mnist1d() -> Data:
    """MNIST-1D, made from its templates."""
    from mnist1d.data import get_dataset_args, make_dataset

    found = make_dataset(get_dataset_args())
    x, y, x_test, y_test = (torch.as_tensor(found[key]) for key in ("x", "y", "x_test", "y_test"))
    return Data(x.float(), y.long(), x_test.float(), y_test.long())


class Ours(nn.Module):
    """Layers on sequences; the mean over time."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, features] -> [B, classes]`."""
        functional.reset_net(self)
        found: Tensor = self.layers(x)
        return found.mean(0)


class SpikingJellyLayers(nn.Module):
    """The digits' network in SpikingJelly."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron
        from spikingjelly.activation_based import surrogate as theirs

        def lif() -> nn.Module:
            made: nn.Module = neuron.LIFNode(tau=2.0, surrogate_function=theirs.ATan(), step_mode="m")
            return made

        self.layers = nn.Sequential(nn.Linear(64, 128), lif(), nn.Linear(128, 10), lif())

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, features] -> [B, classes]`."""
        from spikingjelly.activation_based import functional as theirs

        theirs.reset_net(self)
        found: Tensor = self.layers(x)
        return found.mean(0)


class SnnTorchLayers(nn.Module):
    """The convolutions in snnTorch, which steps through time in Python."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        import snntorch

        self.layers = nn.ModuleList(
            (
                *convolutions(),
                nn.Linear(5 * CHANNELS, 10),
            )
        )
        self.neurons = nn.ModuleList(snntorch.Leaky(beta, spike_grad=snntorch.surrogate.atan()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, 1, 40] -> [B, classes]`."""
        *convs, last = self.layers
        neurons: list[Any] = list(self.neurons)
        membranes = [neuron.init_leaky() for neuron in neurons]
        total: Tensor | float = 0.0
        for step in x:
            spikes = step
            for i, (conv, neuron) in enumerate(zip(convs, neurons, strict=True)):
                spikes, membranes[i] = neuron(conv(spikes), membranes[i])
            total = total + last(spikes.flatten(1))
        assert isinstance(total, Tensor)
        return total / len(x)


def convolutions() -> list[nn.Module]:
    """Those of the network of MNIST-1D's authors: 40 numbers become 19, 10 and 5 in `CHANNELS` channels."""
    return [
        nn.Conv1d(1, CHANNELS, 5, stride=2, padding=1),
        nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
        nn.Conv1d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
    ]


def _lif() -> LIF:
    return LIF(tau=2.0, surrogate_function=surrogate.ATan())


def _convolutional(beta: float = BETA) -> Ours:
    layers: list[nn.Module] = []
    for conv in convolutions():
        layers += [OverTime(conv), Leaky(beta)]
    return Ours(*layers, nn.Flatten(2), nn.Linear(5 * CHANNELS, 10))


TASKS = {
    "digits": Task(
        load_digits,
        lambda: Ours(nn.Linear(64, 128), _lif(), nn.Linear(128, 10), _lif()),
        SpikingJellyLayers,
        lambda x: x.expand(8, *x.shape) * 3,
        "SpikingJelly 2.0.0, `step_mode='m'`",
        '97% (support vector machine, no spikes; scikit-learn, "Recognizing hand-written digits")',
        epochs=20,
        batch=64,
        rate=5e-3,
        clip=float("inf"),
    ),
    "mnist1d": Task(
        load_mnist1d,
        _convolutional,
        lambda: SnnTorchLayers(BETA),
        lambda x: x.expand(8, *x.shape).unsqueeze(2),
        "snnTorch 1.0.0",
        "94% the same convolutions, 68% perceptron, 32% logistic regression, no spikes "
        '(Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", ICML 2024)',
        epochs=40,
        batch=100,
        rate=5e-3,
        clip=1.0,
    ),
}


@dataclass
class Trained:
    """One library's network while it trains."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    seconds: list[float]


def train_epoch(one: Trained, task: Task, data: Data, order: Tensor) -> None:
    """One pass over the training set."""
    begun = time.perf_counter()
    for chosen in order.split(task.batch):
        value = F.cross_entropy(one.net(task.sequence(data.x[chosen])), data.y[chosen])
        one.optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(one.net.parameters(), task.clip)
        one.optimizer.step()
    one.scheduler.step()
    if data.x.is_cuda:
        torch.cuda.synchronize()
    one.seconds.append(time.perf_counter() - begun)


@torch.no_grad()
def accuracy(net: nn.Module, task: Task, data: Data) -> float:
    """Of the test set, in percent."""
    found = torch.cat([net(task.sequence(x)).argmax(1) for x in data.x_test.split(500)])
    return 100 * float((found == data.y_test).double().mean())


def run(task: Task, data: Data, seed: int, epochs: int) -> list[tuple[float, list[float]]]:
    """Accuracy and seconds per epoch of both libraries, ours first, from the same weights and on the same batches."""
    torch.manual_seed(seed)
    nets = [task.ours().to(data.x.device), task.theirs().to(data.x.device)]
    with torch.no_grad():
        for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            other.copy_(mine)
    trained = []
    for net in nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=task.rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        trained.append(Trained(net, optimizer, scheduler, []))
    for _ in range(epochs):
        order = torch.randperm(len(data.x)).to(data.x.device)
        for one in trained:
            train_epoch(one, task, data, order)
    found = [(accuracy(one.net, task, data), one.seconds[1:]) for one in trained]
    print(f"seed {seed}:", [(score, median(seconds)) for score, seconds in found], flush=True)
    return found


def row(name: str, seeds: int, epochs: int | None, device: str) -> str:
    """A row of the table."""
    task = TASKS[name]
    found = task.load()
    data = Data(*(tensor.to(device) for tensor in (found.x, found.y, found.x_test, found.y_test)))
    epochs = epochs or task.epochs
    runs = [run(task, data, seed, epochs) for seed in range(seeds)]
    cells = []
    for side in zip(*runs, strict=True):
        scores = [score for score, _ in side]
        spread = f" ± {stdev(scores):.2f}" if seeds > 1 else ""
        seconds = median(second for _, times in side for second in times)
        cells += [f"{mean(scores):.2f}{spread}%", f"{seconds:.3f}"]
    ours, our_seconds, theirs, their_seconds = cells
    return (
        f"| {name} | {epochs} | {ours} | {our_seconds} | {task.peer} | {theirs} | {their_seconds} | {task.published} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description="Accuracy on real data, over seeds.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "real_data.md")
    parser.add_argument("--only", nargs="+", choices=sorted(TASKS), default=sorted(TASKS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of each task's own")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    rows = [row(name, options.seeds, options.epochs, options.device) for name in options.only]
    device = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU ({platform.machine()})"
    text = [
        "# Accuracy on real data",
        "",
        "`python benchmarks/real_data.py`, whose head says what each network and each split is.",
        f"{device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date.today()}; {options.seeds} seeds, mean ± standard deviation; seconds: "
        "median over epochs, both libraries in turns.",
        "",
        "| data | epochs | this project | s / epoch | the same network in | accuracy | s / epoch | published |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    options.output.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
