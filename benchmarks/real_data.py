"""Table of accuracies on real data over several seeds, compared with the same networks in another library and with
published accuracies.

    hatch run peers && hatch run series && hatch run python benchmarks/real_data.py
    python benchmarks/real_data.py [--output FILE] [--only NAME ...] [--seeds 5] [--epochs N] [--device cpu]
    python benchmarks/real_data.py --seconds-only --device cuda [--samples FILE] [--epochs 6] ...

The data sets come from packages that contain or generate them:

- digits: the digits of scikit-learn, 8 x 8 pixels. The first half is for training and the second half for the test, as
  in scikit-learn's example. Each pixel is a constant current in all 8 steps. The network has two layers of `LIF`.
- mnist1d: 4,000 rows of 40 values for training and 1,000 for the test, which the package `mnist1d` generates with its
  default seed. A row is the current in all 8 steps. The network has the three convolutions that the authors of the data
  set use, each followed by `Leaky`, and then the mean over time of a linear layer.
- japanese_vowels: 270 recordings of nine speakers for training and 370 for the test, with 12 values per step and 7 to
  29 steps, from the package `aeon`. The network has a layer of `RLeaky`, and then the mean of a linear layer over the
  steps of each recording.
- basic_motions: 40 recordings of four movements for training and 40 for the test, with 6 values per step and 100
  steps, from `aeon`. The network has two layers of `Leaky`, and then the mean of a linear layer over time.

The networks of both libraries start with the same weights and get the same batches. Their epochs alternate. The seconds
per epoch cover only training, without the first epoch. The networks are in `real_data_networks.py`.

With `--seconds-only`, the script trains one seed for a few epochs, and writes no accuracy. With `--samples FILE`, it
reads the data sets from a file, so that it can run on a machine without the packages of the data. If the file does not
exist, the script first writes it.
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

import torch
from real_data_networks import (
    Network,
    OurConvolutions,
    OurDigits,
    OurLayers,
    OurRecurrent,
    SnnTorchConvolutions,
    SnnTorchLayers,
    SnnTorchRecurrent,
    SpikingJellyDigits,
)
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
UEA = (
    '(1-nearest neighbour, no spikes; Bagnall et al., "The UEA multivariate time series classification archive", 2018)'
)


@dataclass(frozen=True)
class Part:
    """Samples `[T, N, ...]`, their lengths `[N]`, and classes `[N]`."""

    x: Tensor
    lengths: Tensor
    y: Tensor

    def of(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the chosen samples."""
        return self.x[:, chosen], self.lengths[chosen], self.y[chosen]

    def to(self, device: str) -> Part:
        """Returns the part with all tensors on a device."""
        return Part(self.x.to(device), self.lengths.to(device), self.y.to(device))


@dataclass(frozen=True)
class Task:
    """A data set, its network in both libraries, and published accuracies.

    Attributes:
        load: function that returns samples for training and for the test.
        ours, theirs: functions that make modules whose parameters have the same shapes and the same order.
        peer: name of the other library.
        published: published accuracies and their source, as text.
    """

    load: Callable[[], tuple[Part, Part]]
    ours: Callable[[], Network]
    theirs: Callable[[], Network]
    peer: str
    published: str
    epochs: int
    batch: int
    rate: float
    clip: float = 1.0


def repeat_rows(rows: Tensor, y: Tensor, steps: int = 8) -> Part:
    """Returns samples whose current is the same row in all steps."""
    return Part(rows.expand(steps, *rows.shape), torch.full((len(y),), steps), y)


def load_digits() -> tuple[Part, Part]:
    """Returns the two halves of the handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits as load

    digits = load()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16 * 3
    y = torch.tensor(digits.target)
    half = len(x) // 2
    return repeat_rows(x[:half], y[:half]), repeat_rows(x[half:], y[half:])


def load_mnist1d() -> tuple[Part, Part]:
    """Returns MNIST-1D, generated from its templates."""
    from mnist1d.data import get_dataset_args, make_dataset

    arrays = make_dataset(get_dataset_args())
    x, y, x_test, y_test = (torch.as_tensor(arrays[key]) for key in ("x", "y", "x_test", "y_test"))
    return repeat_rows(x.float().unsqueeze(1), y.long()), repeat_rows(x_test.float().unsqueeze(1), y_test.long())


def load_series(name: str) -> tuple[Part, Part]:
    """Returns multivariate series from `aeon`, normalised by the mean and deviation of each channel in the training
    set.
    """
    import aeon.datasets

    load = getattr(aeon.datasets, f"load_{name}")
    series_by_split = {split: load(split=split) for split in ("train", "test")}
    names = sorted({str(label) for label in series_by_split["train"][1]})
    training_series = torch.cat([torch.as_tensor(series).float() for series in series_by_split["train"][0]], 1)
    center, spread = training_series.mean(1), training_series.std(1)
    parts = []
    for series, labels in series_by_split.values():
        rows = [((torch.as_tensor(values).float().T - center) / spread) for values in series]
        lengths = torch.tensor([len(make_row) for make_row in rows])
        y = torch.tensor([names.index(str(label)) for label in labels])
        parts.append(Part(nn.utils.rnn.pad_sequence(rows), lengths, y))
    return parts[0], parts[1]


TASKS = {
    "digits": Task(
        load_digits,
        OurDigits,
        SpikingJellyDigits,
        "SpikingJelly 2.0.0, `step_mode='m'`",
        '97% (support vector machine, no spikes; scikit-learn, "Recognizing hand-written digits")',
        epochs=20,
        batch=64,
        rate=5e-3,
        clip=float("inf"),
    ),
    "mnist1d": Task(
        load_mnist1d,
        OurConvolutions,
        SnnTorchConvolutions,
        "snnTorch 1.0.0",
        "94% the same convolutions, 68% perceptron, 32% logistic regression, no spikes "
        '(Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", ICML 2024)',
        epochs=40,
        batch=100,
        rate=5e-3,
    ),
    "japanese_vowels": Task(
        lambda: load_series("japanese_vowels"),
        lambda: OurRecurrent(12, 9),
        lambda: SnnTorchRecurrent(12, 9),
        "snnTorch 1.0.0",
        f"94.9% time warping {UEA}",
        epochs=40,
        batch=30,
        rate=3e-3,
    ),
    "basic_motions": Task(
        lambda: load_series("basic_motions"),
        lambda: OurLayers(6, 4),
        lambda: SnnTorchLayers(6, 4),
        "snnTorch 1.0.0",
        f"97.5% time warping {UEA}",
        epochs=60,
        batch=10,
        rate=3e-3,
    ),
}


def load_samples(name: str, path: Path | None) -> tuple[Part, Part]:
    """Returns a data set. If `path` is not `None`, the data set is read from this file."""
    if path is None:
        return TASKS[name].load()
    if not path.is_file():
        torch.save({name: [vars(part) for part in task.load()] for name, task in TASKS.items()}, path)
    training, test = torch.load(path)[name]
    return Part(**training), Part(**test)


@dataclass
class Trained:
    """The network of one library during training."""

    net: Network
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    seconds: list[float]


def train_epoch(trained: Trained, task: Task, part: Part, order: Tensor) -> None:
    """Trains a network for one pass over the training set."""
    begun = time.perf_counter()
    for chosen in order.split(task.batch):
        x, lengths, y = part.of(chosen)
        value = F.cross_entropy(trained.net(x, lengths), y)
        trained.optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(trained.net.parameters(), task.clip)
        trained.optimizer.step()
    trained.scheduler.step()
    if part.x.is_cuda:
        torch.cuda.synchronize()
    trained.seconds.append(time.perf_counter() - begun)


@torch.no_grad()
def measure_accuracy(net: Network, part: Part) -> float:
    """Returns the percentage of samples that are classified correctly."""
    num_correct = 0
    for chosen in torch.arange(len(part.y), device=part.y.device).split(500):
        x, lengths, y = part.of(chosen)
        num_correct += int((net(x, lengths).argmax(1) == y).sum())
    return 100 * num_correct / len(part.y)


def train_both(task: Task, training: Part, test: Part, seed: int, epochs: int) -> list[tuple[float, list[float]]]:
    """Trains both networks from the same weights with the same batches. Returns the accuracy and the seconds per epoch
    of each network, first of this project's network.
    """
    torch.manual_seed(seed)
    nets = [task.ours().to(training.x.device), task.theirs().to(training.x.device)]
    with torch.no_grad():
        for source, parameter in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            parameter.copy_(source)
    trained = []
    for net in nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=task.rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        trained.append(Trained(net, optimizer, scheduler, []))
    for _ in range(epochs):
        order = torch.randperm(len(training.y)).to(training.x.device)
        for network in trained:
            train_epoch(network, task, training, order)
    results = [(measure_accuracy(network.net, test), network.seconds[1:]) for network in trained]
    print(f"seed {seed}:", [(score, median(seconds)) for score, seconds in results], flush=True)
    return results


def make_row(name: str, options: argparse.Namespace) -> str:
    """Trains the networks of a task, and returns a row of the table."""
    task = TASKS[name]
    training, test = (part.to(options.device) for part in load_samples(name, options.samples))
    epochs = options.epochs or task.epochs
    runs = [train_both(task, training, test, seed, epochs) for seed in range(options.seeds)]
    cells = []
    for side in zip(*runs, strict=True):
        scores = [score for score, _ in side]
        spread = f" ± {stdev(scores):.2f}" if options.seeds > 1 else ""
        seconds = f"{median(second for _, times in side for second in times):.3f}"
        cells += [seconds] if options.seconds_only else [f"{mean(scores):.2f}{spread}%", seconds]
    if options.seconds_only:
        return f"| {name} | {cells[0]} | {task.peer} | {cells[1]} |"
    ours, our_seconds, theirs, their_seconds = cells
    return (
        f"| {name} | {epochs} | {ours} | {our_seconds} | {task.peer} | {theirs} | {their_seconds} | {task.published} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description="Accuracy on real data, over seeds.")
    parser.add_argument("--output", type=Path, help="benchmarks/results/real_data.md, or real_data_seconds.md")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="epochs instead of the default of each task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--note", default="", help="sentence about the run that is written above the table")
    parser.add_argument("--samples", type=Path, help="file with the data sets")
    parser.add_argument(
        "--seconds-only", action="store_true", help="measure no accuracies; one seed, 6 epochs by default"
    )
    options = parser.parse_args(arguments)
    if options.seconds_only:
        options.seeds, options.epochs = 1, options.epochs or 6
    if options.output is None:
        name = "real_data_seconds.md" if options.seconds_only else "real_data.md"
        options.output = ROOT / "benchmarks" / "results" / name
    rows = read_rows(options.output)
    for name in options.only:
        rows[name] = make_row(name, options)
        write(options, [rows[name] for name in TASKS if name in rows])


def read_rows(path: Path) -> dict[str, str]:
    """Returns the rows of an earlier run by data set. A run with `--only` keeps the rows of all other data sets."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: line for line in lines for name in TASKS if line.startswith(f"| {name} |")}


def write(options: argparse.Namespace, rows: list[str]) -> None:
    """Writes the table with the rows so far."""
    device = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU ({platform.machine()})"
    machine = (
        f"{device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date.today()}"
    )
    if options.seconds_only:
        text = [
            "# Seconds of an epoch on real data",
            "",
            "`python benchmarks/real_data.py --seconds-only`: median times of training without the first epoch. The",
            f"epochs of both libraries alternate. {machine}. {options.note}".rstrip(),
            "",
            "| data | this project, s / epoch | the same network in | s / epoch |",
            "|---|---|---|---|",
        ]
    else:
        text = [
            "# Accuracy on real data",
            "",
            "`python benchmarks/real_data.py`. The docstring of the script describes each network and each split.",
            f"{machine}; {options.seeds} seeds, mean ± standard deviation; seconds: "
            f"median over epochs, which alternate between both libraries. {options.note}".rstrip(),
            "",
            "| data | epochs | this project | s / epoch | the same network in | accuracy | s / epoch | published |",
            "|---|---|---|---|---|---|---|---|",
        ]
    text += [*rows, ""]
    options.output.write_text("\n".join(text), encoding="utf-8")
    print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
