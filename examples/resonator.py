"""Defines a neuron with two states, which resonates, and learns the frequency of its input.

    python examples/resonator.py [--backend auto] [--device cpu] [--steps 120] [--updates 80] [--seed 0]

The states `u` and `v` of a resonate-and-fire neuron form a vector, which rotates by `omega` radians per step and
becomes a little shorter. Input pulses in phase with this rotation add up to a spike, and other pulses do not. The
example first prints how often neurons of four frequencies spike in response to pulses of each frequency. Then neurons
of random frequencies learn to distinguish four rhythms.

Source: Izhikevich, "Resonate-and-fire neurons", Neural Networks 2001.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexsn_nn import surrogate
from flexsn_nn.neuron import Neuron

PERIODS = (8.0, 11.0, 15.0, 20.0)  # steps between two pulses
NEURONS = 32
BATCH = 64


class Resonator(Neuron):
    """Resonate-and-fire neuron: `u' = d (u cos omega - v sin omega) + x` and `v' = d (u sin omega + v cos omega)`.

    The neuron fires where `v' >= 1`. After a spike, both states are 0.

    Args:
        omega: radians per step, `[C]`; learned.
        decay: `d`, the fraction of the states that remains after a step.
        backend: backend, as in `FlexSN`.
    """

    state_names = ("u", "v")
    omega: nn.Parameter
    decay: float

    def __init__(self, omega: Tensor, decay: float = 0.98, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.hold("omega", omega, learn=True)
        self.hold("decay", decay)
        self.spike = surrogate.ATan()

    def dynamics(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        cosine, sine = self.decay * torch.cos(self.omega), self.decay * torch.sin(self.omega)
        first_component, second_component = cosine * u - sine * v + x, sine * u + cosine * v
        spike = self.spike(second_component - 1.0)
        return spike, first_component * (1.0 - spike), second_component * (1.0 - spike)


class Network(nn.Module):
    """A network from rhythms `[T, B, 1]` to one score per period, `[B, 4]`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        periods = torch.empty(NEURONS).uniform_(min(PERIODS) - 2, max(PERIODS) + 4)
        self.resonators = Resonator(2 * math.pi / periods, backend=backend)
        self.outward = nn.Linear(NEURONS, len(PERIODS))

    def forward(self, rhythm: Tensor) -> Tensor:
        self.resonators.reset()
        spikes = self.resonators(rhythm.expand(-1, -1, NEURONS))
        scores: Tensor = self.outward(spikes.sum(0))
        return scores


def pulses(periods: Tensor, steps: int, jitter: float = 0.0) -> Tensor:
    """Returns pulses of size 0.6, with one pulse per period: `[T, B, 1]` for periods `[B]`.

    If `jitter` is positive, phases are random. In each step, a pulse is then removed or added with this probability.
    """
    phase = torch.rand_like(periods) * periods if jitter > 0 else torch.zeros_like(periods)
    time = torch.arange(steps, device=periods.device).unsqueeze(1) + phase
    beats = (time.remainder(periods) < 1.0).float()
    errors = (torch.rand_like(beats) < jitter).float()
    return 0.6 * (beats - errors).abs().unsqueeze(2)


def selectivity(steps: int, device: torch.device, backend: str = "auto") -> Tensor:
    """Counts the spikes of neurons. Rows are the periods of the neurons, and columns are the periods of the pulses."""
    periods = torch.tensor(PERIODS, device=device)
    neurons = Resonator(2 * math.pi / periods, backend=backend).to(device)
    with torch.no_grad():
        spikes: Tensor = neurons(pulses(periods, steps).expand(-1, -1, len(PERIODS)))
    return spikes.sum(0).T


class Result(NamedTuple):
    """Results of a training run. `moved` is the mean change of `omega`, in radians per step."""

    losses: list[float]
    accuracy: float
    moved: float


def train(steps: int, updates: int, seed: int, device: torch.device, backend: str = "auto") -> Result:
    torch.manual_seed(seed)
    network = Network(backend).to(device)
    start = network.resonators.omega.detach().clone()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    periods = torch.tensor(PERIODS, device=device)
    losses = []

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        classes = torch.randint(len(PERIODS), (batch,), device=device)
        return pulses(periods[classes], steps, jitter=0.02), classes

    for _ in range(updates):
        rhythm, classes = draw(BATCH)
        loss = cross_entropy(network(rhythm), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        rhythm, classes = draw(1000)
        accuracy = float((network(rhythm).argmax(1) == classes).float().mean())
    return Result(losses, accuracy, float((network.resonators.omega.detach() - start).abs().mean()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="resonator", description="A neuron with two states.")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--steps", type=int, default=120, help="time steps of a rhythm")
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    print("number of spikes of a neuron with period … (row) for pulses with period … (column)")
    print("     " + "".join(f"{period:6.0f}" for period in PERIODS))
    for period, row in zip(
        PERIODS, selectivity(settings.steps, settings.device, settings.backend).tolist(), strict=True
    ):
        print(f"{period:5.0f}" + "".join(f"{count:6.0f}" for count in row))
    result = train(settings.steps, settings.updates, settings.seed, settings.device, settings.backend)
    print(
        f"four rhythms with noise: loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}, accuracy "
        f"{result.accuracy:.1%}; omega moved by {result.moved:.2f} on average"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
