"""Functions that the examples on data sets share: the training loop, checkpoints, and the final figure.

The results of a run that resumes from a checkpoint are bitwise equal to those of an uninterrupted run. A batch is
`(*inputs, targets)`. The network maps the inputs to scores `[B, C]`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from flexsn_nn import data, functional, monitor, plot

mpl.use("Agg")
from matplotlib import pyplot as plt


@dataclass
class History:
    """The loss and the accuracy of each epoch."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def parser(name: str, description: str, reader: str, epochs: int, batch: int) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that the examples share."""
    argument_parser = argparse.ArgumentParser(prog=name, description=description)
    argument_parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"folder from which {reader} reads its files, or to which it downloads them",
    )
    argument_parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints after each epoch; an existing one is resumed",
    )
    argument_parser.add_argument("--out", type=Path, default=Path(f"{name}.png"), help="file for the figure")
    argument_parser.add_argument(
        "--epochs", type=positive, default=epochs, help="including the epochs of a resumed checkpoint"
    )
    argument_parser.add_argument("--batch", type=positive, default=batch, help="samples per step")
    argument_parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam")
    argument_parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    argument_parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    argument_parser.add_argument("--seed", type=int, default=0)
    return argument_parser


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def fit(network: nn.Module, training: Any, held_out: Any, settings: argparse.Namespace, collate: Any = None) -> History:
    """Trains until `settings.epochs` epochs are complete, including the epochs of a checkpoint.

    Args:
        network: network from the inputs of a batch to scores `[B, C]`, on `settings.device`.
        training, held_out: data sets of samples for `collate`.
        settings: arguments of `parser`.
        collate: function that makes a batch from samples; `None` for PyTorch's default.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr)
    history = History()
    num_epochs_before = resume(settings.checkpoint, network, optimizer, history)
    if num_epochs_before:
        print(f"resumed after {num_epochs_before} epochs, held-out accuracy {history.accuracies[-1]:.2%}")
    for epoch in range(num_epochs_before, settings.epochs):
        # The order of the samples depends only on the seed and the epoch, so a resumed run has the same order.
        order = torch.Generator().manual_seed(1000 * settings.seed + epoch)
        loader = DataLoader(training, settings.batch, shuffle=True, generator=order, collate_fn=collate)
        total = torch.zeros((), device=settings.device)
        network.train()
        for *inputs, targets in tqdm(loader, desc=f"epoch {epoch + 1}/{settings.epochs}", leave=False):
            functional.reset_net(network)
            loss = nn.functional.cross_entropy(network(*to(settings.device, inputs)), targets.to(settings.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        history.losses.append(total.item() / len(loader))
        tests = DataLoader(held_out, settings.batch, collate_fn=collate)
        history.accuracies.append(accuracy(network, tests, settings.device))
        print(
            f"epoch {epoch + 1}/{settings.epochs}  loss {history.losses[-1]:.4f}  "
            f"held-out accuracy {history.accuracies[-1]:.2%}"
        )
        keep(settings.checkpoint, network, optimizer, history)
    return history


@torch.no_grad()
def accuracy(network: nn.Module, loader: DataLoader[Any], device: str) -> float:
    network.eval()
    num_correct = torch.zeros((), device=device)
    count = 0
    for *inputs, targets in loader:
        functional.reset_net(network)
        num_correct += (network(*to(device, inputs)).argmax(1) == targets.to(device)).sum()
        count += len(targets)
    return num_correct.item() / count


def to(device: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def keep(folder: Path | None, network: nn.Module, optimizer: torch.optim.Optimizer, history: History) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    content = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "history": asdict(history)}
    torch.save(content, folder / "writing.pt")
    os.replace(folder / "writing.pt", folder / "last.pt")  # so that `last.pt` is always complete, or absent


def resume(folder: Path | None, network: nn.Module, optimizer: torch.optim.Optimizer, history: History) -> int:
    """Loads the checkpoint. Returns the number of its epochs, or 0 without a checkpoint."""
    if folder is None or not (folder / "last.pt").exists():
        return 0
    content = torch.load(folder / "last.pt", map_location="cpu", weights_only=True)
    network.load_state_dict(content["network"])
    optimizer.load_state_dict(content["optimizer"])
    history.losses[:], history.accuracies[:] = content["history"]["losses"], content["history"]["accuracies"]
    return len(history.losses)


@torch.no_grad()
def draw(network: nn.Module, history: History, batch: Sequence[Tensor], settings: argparse.Namespace) -> None:
    """Draws the accuracy, the spikes of the first spiking layer for one sample, and the firing rates of all layers.

    Args:
        batch: `(sequences, lengths, targets)` from `pad_sequences`, or `(images, targets)`.
    """
    *inputs, _ = batch
    functional.reset_net(network)
    network.eval()
    with monitor.SpikeMonitor(network) as spike_monitor:
        network(*to(settings.device, inputs))
    outputs = {name: spike_monitor.sequence(name).cpu() for name in spike_monitor.layers}
    # A readout returns membrane potentials, which are excluded.
    spikes = {name: s for name, s in outputs.items() if ((s == 0) | (s == 1)).all()}
    steps, count = next(iter(spikes.values())).shape[:2]
    lengths = inputs[1] if len(inputs) > 1 else torch.full((count,), steps)

    figure, (curve, raster, rates) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    epochs = range(1, len(history.accuracies) + 1)
    curve.plot(epochs, history.accuracies, marker=".")
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.set(xlabel="epoch", ylabel="held-out accuracy", ylim=(0, 1), title="accuracy")
    first, sequence = next(iter(spikes.items()))
    plot.raster(sequence[: int(lengths[0]), 0], ax=raster).set(title=f"spikes of layer {first}, one sample")
    # The readout excludes padded steps, which are silent and would lower the rates.
    means = {name: float(data.readout(s, lengths).mean()) for name, s in spikes.items()}
    plot.firing_rates(means, ax=rates).set(title="rates", xlabel="layer")
    figure.savefig(settings.out, dpi=110)
    plt.close(figure)


def report(history: History, length: str, settings: argparse.Namespace) -> None:
    epochs = len(history.accuracies)
    print(f"held-out accuracy {history.accuracies[-1]:.2%} after {epochs} epochs of {length}; wrote {settings.out}")
