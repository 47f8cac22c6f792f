"""Neurons whose states have different shapes: a neuron with branches, two populations, and a row of competing neurons.

    python examples/shapes.py [--backend auto] [--device cpu] [--steps 40] [--updates 60] [--seed 0]

The example defines these neurons. A layer of each kind learns to distinguish pairs of pulses: one input line fires,
then another line fires, and the class is the line that fired first. The branches of a dendritic neuron remember the
first pulse. Inhibitory and competing neurons suppress the second pulse. The example prints the accuracy of each layer,
and the backend that ran it.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from flexsn_nn import surrogate
from flexsn_nn.neuron import Neuron

LINES = 4
NEURONS = 24
BATCH = 48


class Dendritic(Neuron):
    """A neuron whose branches, coupled by a small matrix, drive an apical compartment and a soma. The soma fires at 1.

    Args:
        neurons: number of neurons N. The input is `[T, B, N]`, and the branches are `[B, N, K]`.
        branches: number K of branches per neuron, up to 16.
        backend: backend, as in `FlexSN`.
    """

    state_names = ("v", "apical", "branches")

    def __init__(self, neurons: int, branches: int = 4, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.spike = surrogate.ATan()
        self.weight = nn.Parameter(torch.rand(neurons, branches))
        self.between = nn.Parameter(torch.diag(torch.linspace(0.5, 0.95, branches)))

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        v, apical, _ = super().init_states(num_states, step_mode, *inputs)
        return [v, apical, v.new_zeros(*v.shape, self.weight.shape[1])]

    def dynamics(self, x: Tensor, v: Tensor, apical: Tensor, branches: Tensor) -> tuple[Tensor, ...]:
        branches = linear(branches, self.between) + x.unsqueeze(-1) * self.weight
        local = torch.tanh(branches)
        apical = 0.9 * apical + 0.1 * local.amax(-1)
        h = v + (local.sum(-1) + apical - v) / 2.0
        s = self.spike(h - 1.0)
        return s, h * (1.0 - s), apical, branches


class ExcitatoryInhibitory(Neuron):
    """LIF neurons that inhibit each other through a smaller number of inhibitory neurons.

    Args:
        neurons: number of neurons N. The input is `[T, B, N]`.
        inhibitory: number M of inhibitory neurons. Their states are `[B, M]`.
        backend: backend, as in `FlexSN`.
    """

    state_names = ("s", "v", "s_inhibitory", "v_inhibitory")

    def __init__(self, neurons: int, inhibitory: int, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.spike = surrogate.ATan()
        self.onto = nn.Parameter(4.0 * torch.rand(inhibitory, neurons) / neurons)
        self.back = nn.Parameter(torch.rand(neurons, inhibitory) / inhibitory)

    def init_states(self, num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor]:
        s, v, *_ = super().init_states(num_states, step_mode, *inputs)
        inhibitory_state = s.new_zeros(*s.shape[:-1], len(self.onto))
        return [s, v, inhibitory_state, inhibitory_state.clone()]

    def dynamics(self, x: Tensor, s: Tensor, v: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - linear(z, self.back.abs()) - v) / 2.0
        k = u + (linear(s, self.onto.abs()) - u) / 2.0
        s, z = self.spike(h - 1.0), self.spike(k - 1.0)
        return s, s, h * (1.0 - s), z, k * (1.0 - z)


class WinnerTakesAll(Neuron):
    """Neurons in rows. The neuron with the largest value in a row fires, and inhibits the others.

    Args:
        strength: strength of the inhibition.
        backend: backend, as in `FlexSN`.
    """

    state_names = ("v",)
    strength: float

    def __init__(self, strength: float = 0.5, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.spike = surrogate.ATan()
        self.hold("strength", strength)

    def dynamics(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (x - v) / 2.0
        s = self.spike(h - 0.5) * (h >= h.amax(-1, keepdim=True))
        return s, h * (1.0 - s) - self.strength * s.sum(-1, keepdim=True)


def layers(backend: str) -> dict[str, Neuron]:
    """Returns one layer of each kind."""
    return {
        "dendritic": Dendritic(NEURONS, backend=backend),
        "excitatory and inhibitory": ExcitatoryInhibitory(NEURONS, NEURONS // 4, backend=backend),
        "winner takes all": WinnerTakesAll(backend=backend),
    }


class Network(nn.Module):
    """A network from pulses `[T, B, LINES]` to two scores `[B, 2]`."""

    def __init__(self, layer: Neuron) -> None:
        super().__init__()
        self.inward, self.layer = nn.Linear(LINES, NEURONS), layer
        self.outward = nn.Linear(NEURONS, 2)

    def forward(self, pulses: Tensor) -> Tensor:
        self.layer.reset()
        spikes = self.layer(2.0 * self.inward(pulses))
        scores: Tensor = self.outward(spikes.mean(0) + spikes[-len(spikes) // 4 :].mean(0))
        return scores


def pairs(steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns pulses `[T, B, LINES]` on the first two lines, and the index of the line that fires first.

    All lines have noise.
    """
    first = torch.randint(2, (BATCH,), device=device)
    pulses = 0.1 * torch.rand(steps, BATCH, LINES, device=device)
    rows = torch.arange(BATCH, device=device)
    early, late = steps // 4, 3 * steps // 4
    pulses[:early, rows, first] += 1.0
    pulses[late:, rows, 1 - first] += 1.0
    return pulses, first


class Result(NamedTuple):
    """Results of a training run: the losses of the updates, and the accuracy on new pulses."""

    losses: list[float]
    accuracy: float


def train(layer: Neuron, steps: int, updates: int, seed: int, device: torch.device) -> Result:
    torch.manual_seed(seed)
    network = Network(layer).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    losses = []
    for _ in range(updates):
        pulses, first = pairs(steps, device)
        loss = cross_entropy(network(pulses), first)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        pulses, first = pairs(steps, device)
        accuracy = float((network(pulses).argmax(1) == first).float().mean())
    return Result(losses, accuracy)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="shapes", description="Neurons whose states have different shapes.")
    parser.add_argument("--backend", default="auto", help="auto, cpp, triton, inductor, hop or torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, …")
    parser.add_argument("--steps", type=int, default=40, help="time steps of a sequence")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    torch.manual_seed(settings.seed)
    for name, layer in layers(settings.backend).items():
        losses, accuracy = train(layer, settings.steps, settings.updates, settings.seed, settings.device)
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.1%}")
        print("  " + layer.explain().splitlines()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
