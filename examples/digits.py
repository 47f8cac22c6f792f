"""Trains a spiking network on handwritten digits, with a neuron that is defined here.

    hatch run demo [--backend auto] [--device cpu] [--steps 8] [--epochs 25] [--seed 0] [--out digits.png]

The data are scikit-learn's bundled digits: 1797 images of 8 x 8 pixels. A fifth of the images is held out. Each image
is a constant current for `--steps` time steps (direct coding). The answer is the class whose output neuron fires most.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from flexsn_nn import BackendUnavailableError, FlexSN, graphs

mpl.use("Agg")
from matplotlib import pyplot as plt

THRESHOLD = 1.0
HIDDEN = 128
CLASSES = 10
BATCH = 64


class Spike(torch.autograd.Function):
    """Function that is 1 where `x >= 0` and 0 elsewhere, with the gradient of `sigmoid(4 x)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(4.0 * x)
        return grad * 4.0 * soft * (1.0 - soft)


class LIFStep(nn.Module):
    """One time step of a leaky integrate-and-fire neuron with one learned time constant per channel.

    The charge is `h = v + (x - v) / tau` with `1 / tau = sigmoid(w)`. Where `h >= 1`, the neuron fires, and is then
    reset to 0.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(channels))  # tau = 2

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * torch.sigmoid(self.w)
        spike: Tensor = Spike.apply(h - THRESHOLD)
        return spike, h * (1.0 - spike)


class Network(nn.Module):
    """Two layers of neurons, from pixels `[B, 64]` to firing rates `[B, 10]`."""

    def __init__(self, steps: int, backend: str) -> None:
        super().__init__()
        self.steps = steps
        self.inward = nn.Linear(64, HIDDEN)
        self.hidden_step = LIFStep(HIDDEN)
        self.hidden = FlexSN(self.hidden_step, 1, 1, 1, backend=backend)
        self.outward = nn.Linear(HIDDEN, CLASSES)
        self.readout = FlexSN(LIFStep(CLASSES), 1, 1, 1, backend=backend)

    def forward(self, pixels: Tensor) -> Tensor:
        self.hidden.reset()
        self.readout.reset()
        # The current is the same in every step, so a view without copies is sufficient.
        current = self.inward(pixels).expand(self.steps, -1, -1)
        spikes: Tensor = self.readout(self.outward(self.hidden(current)))
        return spikes.mean(0)


@dataclass
class Data:
    """Pixels `[N, 64]` between 0 and 1, and labels `[N]`."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(device: torch.device, seed: int) -> Data:
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16.0, labels, test_size=0.2, random_state=seed, stratify=labels)
    train_x, test_x = (torch.tensor(p, dtype=torch.float32, device=device) for p in parts[:2])
    train_y, test_y = (torch.tensor(p, device=device) for p in parts[2:])
    return Data(train_x, train_y, test_x, test_y)


def accuracy(network: Network, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((network(x).argmax(1) == y).float().mean())


def train(network: Network, data: Data, epochs: int, seed: int) -> tuple[list[float], list[float]]:
    """Returns the loss and the held-out accuracy after each epoch."""
    on_gpu = data.train_x.is_cuda
    # A captured step reads the learning rate from a tensor on the GPU. A Python number would become a constant of the
    # graph.
    rate = torch.tensor(4e-3, device=data.train_x.device) if on_gpu else 4e-3
    optimizer = torch.optim.Adam(network.parameters(), lr=rate, capturable=on_gpu)
    step = graphs.capture(network, lambda rates, labels: nn.functional.cross_entropy(5.0 * rates, labels), optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    losses, accuracies = [], []
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(data.train_x), generator=generator).to(data.train_x.device)
        total = torch.zeros((), device=data.train_x.device)
        batches = order.split(BATCH)
        for batch in tqdm(batches, desc=f"epoch {epoch:2d}/{epochs}", leave=False):
            total += step(data.train_x[batch], data.train_y[batch])
        scheduler.step()
        losses.append(total.item() / len(batches))
        accuracies.append(accuracy(network, data.test_x, data.test_y))
        print(f"epoch {epoch:2d}/{epochs}  loss {losses[-1]:.4f}  held-out accuracy {accuracies[-1]:.2%}")
    return losses, accuracies


def draw(path: Path, network: Network, image: Tensor, losses: list[float], accuracies: list[float]) -> None:
    """Draws the learning curve, and the spikes of the hidden layer and the membrane of one neuron for one image."""
    network.hidden.store_state_seqs = True
    with torch.no_grad():
        network.hidden.reset()
        current = network.inward(image).expand(network.steps, -1, -1)
        spikes = network.hidden(current)[:, 0].cpu()
        after = network.hidden.state_seqs[0][:, 0].cpu()
        # The membrane potential before the reset, which the step compares with the threshold, is not stored. It is
        # computed again here.
        rates = torch.sigmoid(network.hidden_step.w).cpu()
        before = torch.cat([torch.zeros_like(after[:1]), after[:-1]])
        charged = before + (current[:, 0].cpu() - before) * rates
    network.hidden.store_state_seqs = False
    neuron = int(spikes.sum(0).sub(network.steps / 2).abs().argmin())

    figure, (curve, raster, membrane) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    epochs = range(1, len(losses) + 1)
    curve.plot(epochs, losses, color="tab:blue", label="loss")
    curve.set(xlabel="epoch", ylabel="loss", title="learning curve")
    accuracy_axis = curve.twinx()
    accuracy_axis.plot(epochs, accuracies, color="tab:orange", label="held-out accuracy")
    accuracy_axis.set(ylabel="held-out accuracy")
    curve.legend(*_list_handles(curve, accuracy_axis), loc="center right")
    steps, neurons = spikes.nonzero(as_tuple=True)
    raster.scatter(steps, neurons, s=6, marker="|", color="black")
    raster.set(xlabel="time step", ylabel="hidden neuron", title="spikes of one image")
    membrane.plot(charged[:, neuron], marker="o", label="before the reset")
    membrane.plot(after[:, neuron], marker=".", linestyle=":", label="after the reset")
    membrane.axhline(THRESHOLD, color="tab:red", linestyle="--", label="threshold")
    membrane.set(xlabel="time step", ylabel="membrane", title=f"membrane of hidden neuron {neuron}")
    membrane.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _list_handles(*axes: Any) -> tuple[list[Any], list[str]]:
    pairs = [axis.get_legend_handles_labels() for axis in axes]
    return [h for handles, _ in pairs for h in handles], [text for _, labels in pairs for text in labels]


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"digits: {message}\n")


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="digits", description="Trains a spiking network on handwritten digits.")
    backends = ["auto", "triton", "inductor", "cpp", "hop", "torch"]
    parser.add_argument("--backend", choices=backends, default="auto", help="backend of the neurons")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--steps", type=positive, default=8, help="time steps per image")
    parser.add_argument("--epochs", type=positive, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="file for the figure")
    settings = parser.parse_args(arguments)
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"argument --device: {settings.device!r} cannot be used: {str(error).splitlines()[0]}")
    if not settings.out.parent.is_dir():
        parser.error(f"argument --out: there is no folder {str(settings.out.parent)!r}")
    if settings.out.suffix.lower() != ".png":
        parser.error(f"argument --out: {str(settings.out)!r} does not end in .png")
    return settings


def main(arguments: list[str]) -> int:
    settings = options(arguments)
    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    # The layers are so small that several threads would mostly wait for each other.
    torch.set_num_threads(1)
    data = load(device, settings.seed)
    network = Network(settings.steps, settings.backend).to(device)
    try:
        network(data.test_x[:1])
    except BackendUnavailableError as error:
        print(f"digits: {error}", file=sys.stderr)
        return 2
    print(f"backend {network.hidden.explain()}")
    start = time.perf_counter()
    losses, accuracies = train(network, data, settings.epochs, settings.seed)
    draw(settings.out, network, data.test_x[:1], losses, accuracies)
    print(
        f"held-out accuracy {accuracies[-1]:.2%} after {settings.epochs} epochs of {settings.steps} time steps, "
        f"{time.perf_counter() - start:.1f} s; wrote {settings.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
