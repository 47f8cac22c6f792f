"""Accuracies and firing rates of networks with two recurrent layers after a few epochs. The table shows the settings
with which the networks fire and learn.

    python benchmarks/recurrent_defaults.py [--output FILE] [--epochs 8]

The task has four classes. A sequence has 50 steps of background noise. Each of two groups of channels has a window of
ten steps. The class determines which of the groups fire a burst in their windows. The network is `Linear(20, 64)`, a
recurrent layer, `Linear(64, 64)`, a recurrent layer, `Linear(64, 4)`, `LI(tau=10.0, decay_input=False)`. The network is
trained with Adam at a learning rate of 3e-3. There are 512 samples for training and 512 for the test. Guesses would
reach 25%.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsn_nn import LI, RALIF, RLIF, functional, monitor
from flexsn_nn.errors import FiringWarning

ROOT = Path(__file__).resolve().parents[1]
LAYERS: dict[str, Callable[..., nn.Module]] = {"RLIF": RLIF, "RALIF": RALIF}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    (kind, {"tau": tau, **options})
    for kind, variants in (
        ("RLIF", [{"decay_input": True}, {"decay_input": False}]),
        (
            "RALIF",
            [
                {"decay_input": True, "beta": 1.8},
                {"decay_input": True, "beta": 0.2},
                *({"decay_input": False, "beta": beta} for beta in (1.8, 0.9, 0.5, 0.2, 0.1)),
            ],
        ),
    )
    for tau in (2.0, 10.0)
    for options in variants
]


def make_sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns spikes `[50, count, 20]` and classes `[count]`."""
    labels = torch.randint(4, (count,), generator=generator)
    x = (torch.rand(50, count, 20, generator=generator) < 0.03).float()
    for start, channels, on in ((5, slice(0, 5), labels // 2), (25, slice(5, 10), labels % 2)):
        bursts = torch.rand(10, count, 5, generator=generator) < 0.5 * on[:, None]
        x[start : start + 10, :, channels] = bursts.float()
    return x, labels


def make_row(kind: str, options: dict[str, Any], epochs: int) -> str:
    """Trains a network, and returns its row of the table."""
    generator = torch.Generator().manual_seed(0)
    (x, y), (x_test, y_test) = make_sequences(512, generator), make_sequences(512, generator)
    torch.manual_seed(0)
    make = LAYERS[kind]
    net = nn.Sequential(
        nn.Linear(20, 64),
        make(64, **options),
        nn.Linear(64, 64),
        make(64, **options),
        nn.Linear(64, 4),
        LI(tau=10.0, decay_input=False),
    )
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(512).split(64):
            functional.reset_net(net)
            loss = F.cross_entropy(net(x[:, chosen]).mean(0), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    functional.reset_net(net)
    with torch.no_grad(), monitor.RateMonitor(net, ["1", "3"]) as rates:
        accuracy = float((net(x_test).mean(0).argmax(1) == y_test).float().mean())
    settings = ", ".join(f"{name}={loss}" for name, loss in options.items())
    first, second = rates.rates().values()
    line = f"| {kind} | {settings} | {accuracy:.0%} | {first:.4f} | {second:.4f} |"
    print(line, flush=True)
    return line


def main(arguments: list[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description="Recurrent layers with their initial settings.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "recurrent_defaults.md")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", FiringWarning)
    rows = [make_row(kind, settings, options.epochs) for kind, settings in SETTINGS]
    head = [
        "# Recurrent layers with their initial settings",
        "",
        "`python benchmarks/recurrent_defaults.py`. The docstring of the script describes the task. "
        f"CPU ({platform.machine()}), torch {torch.__version__}, Python {platform.python_version()}, {date.today()}.",
        f"Accuracy after {options.epochs} epochs, and the firing rates of both layers at that time.",
        "",
        "| layers | settings | accuracy | rate of the first | rate of the second |",
        "|---|---|---|---|---|",
    ]
    options.output.write_text("\n".join([*head, *rows, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
