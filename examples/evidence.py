"""Learns time constants to find which of two noisy sources clicks more often over hundreds of steps.

    python examples/evidence.py [--backend auto] [--device cpu] [--steps 300] [--updates 60] [--seed 0]

In each step, one source clicks with a probability of 0.34, and the other source with a probability of 0.26. One step
contains very little evidence, so the answer requires a sum over many steps. Spiking neurons pass the clicks on to an
integrator, which forgets with a time constant `tau`. At first, `tau` is 5 steps. The example trains the network twice:
once with a fixed `tau`, and once with a learned `tau`.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from flexsn_nn import LIF, FlexSN, graphs, surrogate

HIDDEN = 16
BATCH = 64
FIRST_TAU = 5.0


class Integrator(nn.Module):
    """One time step of `v' = v + (x - v) / tau` with `1 / tau = sigmoid(w)` for each channel. The output is `v'`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((channels,), -math.log(FIRST_TAU - 1)))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = v + (x - v) * torch.sigmoid(self.w)
        return v, v


class Network(nn.Module):
    """A network from clicks `[T, B, 2]` to the evidence `[B, 2]` after the last step."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.inward = nn.Linear(2, HIDDEN)
        nn.init.normal_(self.inward.weight, std=2.0)  # large enough that a click makes some of the neurons spike
        self.spiking = LIF(tau=2.0, surrogate_function=surrogate.ATan(), backend=backend)
        self.outward = nn.Linear(HIDDEN, 2)
        self.integrator = Integrator(2)
        self.memory = FlexSN(self.integrator, num_inputs=1, num_states=1, num_outputs=1, backend=backend)

    def forward(self, clicks: Tensor) -> Tensor:
        self.spiking.reset()
        self.memory.reset()
        self.memory(self.outward(self.spiking(self.inward(clicks))))
        return 10.0 * self.memory.states[0]  # scaled up, because averages of spikes are small

    def tau(self) -> list[float]:
        return [1 / rate for rate in torch.sigmoid(self.integrator.w).tolist()]


class Result(NamedTuple):
    """Results of a training run."""

    losses: list[float]
    accuracy: float
    tau: list[float]


def draw(steps: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns clicks `[T, B, 2]`, and the index `[B]` of the source that clicks more often."""
    answers = torch.randint(2, (batch,), device=device)
    probability = 0.26 + 0.08 * one_hot(answers, 2)
    return (torch.rand(steps, batch, 2, device=device) < probability).float(), answers


def train(learn_tau: bool, steps: int, updates: int, seed: int, device: torch.device, backend: str = "auto") -> Result:
    """Trains a network, and measures its accuracy on 1000 new trials."""
    torch.manual_seed(seed)
    network = Network(backend).to(device)
    w = network.integrator.w
    groups = [{"params": [p for p in network.parameters() if p is not w], "lr": 3e-2}]
    if learn_tau:
        groups.append({"params": [w], "lr": 0.2})  # the learning rate is high because tau has to grow a lot
    optimizer = torch.optim.Adam(groups, capturable=device.type == "cuda")
    step = graphs.capture(network, cross_entropy, optimizer)
    losses = []
    for _ in range(updates):
        losses.append(float(step(*draw(steps, BATCH, device))))
    with torch.no_grad():
        clicks, answers = draw(steps, 1000, device)
        accuracy = float((network(clicks).argmax(1) == answers).float().mean())
    return Result(losses, accuracy, network.tau())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="evidence", description="Learns time constants.")
    parser.add_argument("--backend", default="auto", help="auto, triton, inductor, cpp, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--steps", type=int, default=300, help="time steps per trial")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    for learn_tau in (False, True):
        result = train(learn_tau, settings.steps, settings.updates, settings.seed, settings.device, settings.backend)
        print(
            f"tau {'learned' if learn_tau else 'fixed':>7}: {' and '.join(f'{tau:.0f}' for tau in result.tau)} steps"
            f" after {settings.updates} updates, accuracy {result.accuracy:.1%} over {settings.steps} steps"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
