"""Trains under bfloat16 autocast, and shows the effects of the two precisions that a neuron can have.

    python examples/mixed_precision.py [--backend auto] [--device cpu] [--updates 60] [--seed 0]

Under autocast, `nn.Linear` computes in bfloat16 and returns bfloat16. A neuron can process this input in two ways:

    precision="eager"    compute in the dtype of the input, and round after every operation, as PyTorch does
    precision="float32"  compute and keep the state in float32, and return spikes in the dtype of the input

A fast neuron with a reset trains equally well in both ways. A slow neuron needs float32: bfloat16 has 8 significant
bits, so small changes of the membrane are lost in rounding. The example trains a network on scikit-learn's digits
without autocast, and with autocast in both ways. Then it passes a constant input to a membrane with a time constant of
500 steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexsn_nn import LI, LIF, encoding, functional

HIDDEN = 64
STEPS = 8
WAYS = {
    "float32": (False, "eager"),
    "autocast, eager": (True, "eager"),
    "autocast, float32": (True, "float32"),
}


class Result(NamedTuple):
    """Results of a training run, and the dtypes of the neurons' states and spikes."""

    losses: list[float]
    accuracy: float
    state_dtype: torch.dtype
    spike_dtype: torch.dtype


def load(device: torch.device) -> list[Tensor]:
    """Returns pixels `[N, 64]` between 0 and 1 and labels `[N]`, each for training and for the test."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype("float32") / 16
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    return [torch.tensor(part, device=device) for part in parts]


def train(
    autocast: bool, precision: str, updates: int, seed: int, device: torch.device, backend: str = "auto"
) -> Result:
    train_x, test_x, train_y, test_y = load(device)
    torch.manual_seed(seed)
    neuron = LIF(tau=2.0, backend=backend, precision=precision)
    net = nn.Sequential(nn.Linear(64, HIDDEN), neuron, nn.Linear(HIDDEN, 10)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)  # the weights stay in float32

    def scores(x: Tensor) -> Tensor:
        functional.reset_net(net)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output: Tensor = net(encoding.direct(x, STEPS))
        return output.float().mean(0)  # the sum is in float32

    losses = []
    for _ in range(updates):
        loss = cross_entropy(scores(train_x), train_y)
        optimizer.zero_grad()
        loss.backward()  # bfloat16 has the range of float32, so the loss needs no scaling
        optimizer.step()
        losses.append(float(loss.detach()))
    spikes = []
    neuron.register_forward_hook(lambda module, inputs, output: spikes.append(output))
    with torch.no_grad():
        accuracy = float((scores(test_x).argmax(1) == test_y).float().mean())
    return Result(losses, accuracy, neuron.states[0].dtype, spikes[0].dtype)


def slow_membrane(precision: str, dtype: torch.dtype, device: torch.device, backend: str = "auto") -> float:
    """Returns the value of a membrane with `v' = v + (1 - v) / 500` after 1000 steps.

    The correct value is `1 - exp(-2)`, about 0.865.
    """
    neuron = LI(tau=500.0, backend=backend, precision=precision)
    neuron(torch.ones(1000, 1, dtype=dtype, device=device))
    return float(neuron.states[0])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mixed_precision", description="Trains under bfloat16 autocast.")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    where = (settings.device, settings.backend)
    for name, (autocast, precision) in WAYS.items():
        result = train(autocast, precision, settings.updates, settings.seed, *where)
        print(
            f"{name:>17}: loss {result.losses[-1]:.3f}, held-out accuracy {result.accuracy:.1%}, "
            f"state {result.state_dtype}, spikes {result.spike_dtype}"
        )
    print(f"a slow membrane, which should be at {1 - math.exp(-2):.3f}:")
    for precision, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("float32", torch.bfloat16)):
        print(f"{precision:>8} on {dtype}: {slow_membrane(precision, dtype, *where):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
