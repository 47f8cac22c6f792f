"""Trains two recurrent layers to remember which of four cues was shown a hundred steps ago.

    python examples/recurrent.py [--backend auto] [--device cpu] [--steps 100] [--epochs 12] [--seed 0]

In the first ten steps, one of four inputs is active. After that, all inputs are noise. The answer is read at the end.
The neurons themselves forget within a few steps, because their time constant is 3. The cue can only be remembered by
spikes that circulate through the recurrent weights. These weights begin as the identity matrix (Le et al., "A simple
way to initialize recurrent networks of rectified linear units", 2015). The example trains the network twice: once with
recurrent weights that stay 0, and once with recurrent weights that learn. Each time, it prints the seconds per epoch,
and a description of the code that ran. `--backend torch` is the plain loop. On a GPU, a training step is captured as a
CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexsn_nn import LI, RLIF, functional, graphs
from flexsn_nn.surrogate import ATan

CUES = 4
CUE_STEPS = 10
HIDDEN = 32
BATCH = 64
UPDATES = 10  # updates per epoch


class Result(NamedTuple):
    """Results of a training run.

    Attributes:
        losses: mean loss of each epoch.
        accuracy: accuracy on new data.
        seconds: time of the fastest epoch, which compiles nothing.
        ran: description of the code that ran.
    """

    losses: list[float]
    accuracy: float
    seconds: float
    ran: str


class Network(nn.Module):
    """A network from spikes `[T, B, 4]` to scores `[B, 4]` after the last step."""

    def __init__(self, recurrent: bool, backend: str) -> None:
        super().__init__()
        init = nn.init.eye_ if recurrent else nn.init.zeros_
        layers: list[nn.Module] = []
        for features in (CUES, HIDDEN):
            layers.append(nn.Linear(features, HIDDEN))
            layers.append(
                RLIF(
                    HIDDEN,
                    tau=3.0,
                    decay_input=False,
                    surrogate_function=ATan(),
                    init=init,
                    learn_recurrent=recurrent,
                    backend=backend,
                )
            )
        self.layers = nn.Sequential(*layers, nn.Linear(HIDDEN, CUES), LI(tau=5.0, backend=backend))

    def forward(self, x: Tensor) -> Tensor:
        functional.reset_net(self)
        scores: Tensor = self.layers(x)
        return scores[-1]

    def ran(self) -> str:
        """Describes the code that ran the first recurrent layer, and the reason for this choice."""
        first = self.layers[1]
        assert isinstance(first, RLIF)
        return "\n".join(first.explain().splitlines()[:2])


def draw(steps: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns spikes `[steps, batch, 4]`, and the index of the cue, `[batch]`."""
    cue = torch.randint(CUES, (batch,), device=device)
    rates = torch.full((steps, batch, CUES), 0.02, device=device)
    rates[:CUE_STEPS, torch.arange(batch, device=device), cue] = 0.6
    return torch.bernoulli(rates), cue


def train(recurrent: bool, steps: int, epochs: int, seed: int, device: torch.device, backend: str = "auto") -> Result:
    """Trains a network, and measures its accuracy."""
    torch.manual_seed(seed)
    network = Network(recurrent, backend).to(device)
    # In a captured step, Adam counts its steps on the GPU.
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, capturable=device.type == "cuda")
    step = graphs.capture(network, lambda scores, cue: cross_entropy(5.0 * scores, cue), optimizer, max_norm=1.0)
    losses, seconds = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(UPDATES):
            total += step(*draw(steps, BATCH, device)) / UPDATES
        losses.append(total.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    with torch.no_grad():
        x, cue = draw(steps, 1000, device)
        accuracy = float((network(x).argmax(1) == cue).float().mean())
    return Result(losses, accuracy, min(seconds), network.ran())


def main(arguments: list[str]) -> int:
    """Trains a network without recurrent weights, and a network with recurrent weights."""
    parser = argparse.ArgumentParser(prog="recurrent", description="Remembers a cue through recurrent weights.")
    parser.add_argument("--backend", default="auto", choices=["auto", "triton", "cpp", "hop", "torch"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100, help="time steps per sequence, more than ten")
    parser.add_argument("--epochs", type=int, default=12, help=f"epochs of {UPDATES} updates")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    for recurrent in (False, True):
        device = torch.device(settings.device)
        result = train(recurrent, settings.steps, settings.epochs, settings.seed, device, settings.backend)
        print(
            f"{'recurrent' if recurrent else 'without recurrence'}: loss {result.losses[0]:.2f} to "
            f"{result.losses[-1]:.2f}, accuracy {result.accuracy:.1%} over {settings.steps} steps, "
            f"{result.seconds:.2f} s per epoch\n{result.ran}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
