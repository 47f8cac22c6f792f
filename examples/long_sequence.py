"""Learns from sequences of thousands of steps: raw audio, sample by sample, or digits, pixel by pixel.

    python examples/long_sequence.py [--task waves] [--backend auto] [--device cpu] [--epochs 4] [--seed 0]

A sequence of `waves` is one second of synthetic sound with 16,000 samples: one of four tones, with a random phase and
loudness, in noise. A sequence of `pixels` is one of scikit-learn's digits, enlarged to 28 x 28 pixels, and shown as 784
pixels one after another. Spiking neurons with time constants from 2 to 40 steps receive the sequence. The answer is a
linear function of their firing rates in each eighth of the sequence.

There are few neurons and many steps. In such a case, kernels on a GPU run segments of time in parallel if this is
faster. The results do not change. `explain()` shows the number of segments.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from flexsn_nn import ParametricLIF

HIDDEN = 32
BATCH = 32
PARTS = 8
TONES = (200.0, 400.0, 800.0, 1600.0)  # Hz
RATE = 16_000  # samples per second


class Data(NamedTuple):
    """Sequences `[N, T]` and labels `[N]`."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    def to(self, device: torch.device) -> Data:
        train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in self[:4])
        return Data(train_x, train_y, test_x, test_y, self.classes)


def waves(samples: int, steps: int, seed: int) -> Data:
    """Returns tones in noise: `samples` sequences for training, and `samples` for the test."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(TONES), (2 * samples,), generator=generator)
    phase, loudness = torch.rand(2, 2 * samples, 1, generator=generator)
    angle = 2 * math.pi * (torch.tensor(TONES)[labels, None] / RATE * torch.arange(steps) + phase)
    sound = (0.7 + 0.6 * loudness) * angle.sin() + 0.3 * torch.randn(2 * samples, steps, generator=generator)
    return Data(sound[:samples], labels[:samples], sound[samples:], labels[samples:], len(TONES))


def pixels(samples: int, seed: int) -> Data:
    """Returns digits as sequences of 784 pixels.

    The training data are from the first 4/5 of all digits, and the test data from the rest, in random order. Each of
    the two sets has at most `samples` digits.
    """
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    large = interpolate(small, size=(28, 28), mode="bilinear").flatten(1)
    order = torch.randperm(len(large), generator=torch.Generator().manual_seed(seed))
    x, y = 2.0 * large[order], torch.tensor(labels)[order]
    middle = len(x) * 4 // 5
    first = min(samples, middle)
    return Data(x[:first], y[:first], x[middle:][:first], y[middle:][:first], 10)


class Network(nn.Module):
    """A network from sequences `[B, T]` to scores `[B, classes]`.

    Args:
        neuron: neuron that maps `[T, B, HIDDEN]` to spikes; `None` for a neuron of flexsn_nn.
    """

    def __init__(self, classes: int, backend: str = "auto", neuron: nn.Module | None = None) -> None:
        super().__init__()
        self.inward = nn.Linear(1, HIDDEN)
        nn.init.uniform_(self.inward.weight, -3.0, 3.0)
        nn.init.uniform_(self.inward.bias, 0.0, 1.5)
        tau = torch.logspace(math.log2(2.0), math.log2(40.0), HIDDEN, base=2.0)
        self.hidden = ParametricLIF(init_tau=tau, backend=backend) if neuron is None else neuron
        self.outward = nn.Linear(PARTS * HIDDEN, classes)

    def forward(self, sequences: Tensor) -> Tensor:
        if isinstance(self.hidden, ParametricLIF):
            self.hidden.reset()
        spikes = self.hidden(self.inward(sequences.T.unsqueeze(-1)))
        rates = torch.stack([part.mean(0) for part in spikes.tensor_split(PARTS)], 1)
        logits: Tensor = self.outward(8.0 * rates.flatten(1))
        return logits


def optimizer_of(network: Network) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=1e-2)


def train_step(network: Network, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Updates the weights once, and returns the loss before the update."""
    optimizer.zero_grad()
    loss = cross_entropy(network(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Result(NamedTuple):
    """Results of a training run: the loss of each update, the accuracy on new data, and the time of the last epoch."""

    losses: list[float]
    accuracy: float
    seconds: float


def train(network: Network, data: Data, epochs: int, seed: int) -> Result:
    """Trains the network, and measures its accuracy."""
    optimizer = optimizer_of(network)
    generator = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    seconds = 0.0
    for _ in range(epochs):
        start = time.perf_counter()
        for batch in torch.randperm(len(data.train_x), generator=generator).split(BATCH):
            losses.append(train_step(network, optimizer, data.train_x[batch], data.train_y[batch]))
        float(losses[-1])  # waits for the GPU
        seconds = time.perf_counter() - start
    with torch.no_grad():
        parts = zip(data.test_x.split(BATCH), data.test_y.split(BATCH), strict=True)
        num_correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in parts)
    return Result([float(loss) for loss in losses], num_correct / len(data.test_x), seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Learns from raw audio, or from digits pixel by pixel.")
    parser.add_argument("--task", choices=["waves", "pixels"], default="waves")
    parser.add_argument("--backend", choices=["auto", "triton", "inductor", "cpp", "hop", "torch"], default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256, help="number of training sequences")
    parser.add_argument("--steps", type=int, default=RATE, help="steps per wave")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    is_digits = settings.task == "pixels"
    data = (
        pixels(settings.samples, settings.seed) if is_digits else waves(settings.samples, settings.steps, settings.seed)
    )
    data = data.to(device)
    network = Network(data.classes, settings.backend).to(device)
    result = train(network, data, settings.epochs, settings.seed)
    assert isinstance(network.hidden, ParametricLIF)
    print(network.hidden.explain())
    print(
        f"{settings.task}, {data.train_x.shape[1]} steps: loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}, "
        f"accuracy {result.accuracy:.1%} on {len(data.test_x)} new sequences, {result.seconds:.1f} s for an epoch of "
        f"{len(data.train_x)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
