"""Statistics of random numbers that a step draws, and times of training steps of a noisy LIF neuron.

    python benchmarks/noise.py [--output benchmarks/results/noise.md] [--numbers 1e9] [--steps 32] [--rows 256]
        [--neurons 16384] [--rounds 20]

A kernel draws the random numbers, and their sums are computed in float64. The table also shows the distances of the
statistics from the exact values, in standard deviations. The times are medians of training steps. Steps with and
without noise alternate within one run. On a CPU, use fewer numbers (`--numbers 1e7`) and fewer neurons
(`--neurons 512`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measure import describe_machine, milliseconds, publish, table
from torch import Tensor

from flexsn_nn import FlexSN, surrogate
from flexsn_nn.random import bernoulli_like, configure, normal_like, uniform_like

spike = surrogate.Sigmoid()


def draw_step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a step whose outputs are normal and uniform random numbers."""
    return normal_like(v), uniform_like(v), v + x


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = spike(h - 1.0)
    return s, h * (1.0 - s)


def normal_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return lif(x + 0.2 * normal_like(x), v)


def uniform_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return lif(x + 0.2 * uniform_like(x), v)


def bernoulli_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return lif(x * bernoulli_like(x, 0.9), v)


LAYERS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "no noise": lif,
    "uniform": uniform_lif,
    "bernoulli": bernoulli_lif,
    "normal": normal_lif,
}


def measure_moments(required_count: int, device: torch.device, backend: str) -> list[tuple[str, str, str]]:
    """Returns rows of a table: a statistic, its value, and its distance from the exact value in standard deviations."""
    steps, rows = 16, 64
    size = min(1 << 16, max(required_count // (steps * rows), 4) // 4 * 4)
    neuron = FlexSN(draw_step, 1, 1, 2, backend=backend)
    configure(neuron, seed=1)
    x = torch.zeros(steps, rows, 1, device=device).expand(steps, rows, size)
    sums = torch.zeros(9, dtype=torch.float64, device=device)
    count = 0
    with torch.no_grad():
        while count < required_count:
            z, u = neuron(x)
            normal, uniform = z.double(), u.double() - 0.5
            pairs = (normal[..., 0::2] * normal[..., 1::2]).sum(), (normal[1:] * normal[:-1]).sum()
            powers = normal.sum(), normal.square().sum(), normal.pow(3).sum(), normal.pow(4).sum()
            sums += torch.stack(
                [*powers, *pairs, uniform.sum(), uniform.square().sum(), (normal.abs() > 4.0).sum().double()]
            )
            count += z.numel()
    n, totals = count, sums.tolist()
    tail = float(2 * (1 - torch.special.ndtr(torch.tensor(4.0, dtype=torch.float64))))
    exact = (
        ("mean", totals[0] / n, 0.0, (1 / n) ** 0.5),
        ("variance", totals[1] / n, 1.0, (2 / n) ** 0.5),
        ("third moment", totals[2] / n, 0.0, (15 / n) ** 0.5),
        ("fourth moment", totals[3] / n, 3.0, (96 / n) ** 0.5),
        ("product with the neighbour", totals[4] / (n / 2), 0.0, (2 / n) ** 0.5),
        ("product with the next step", totals[5] / (n * (steps - 1) / steps), 0.0, (steps / (steps - 1) / n) ** 0.5),
        ("beyond 4", totals[8] / n, tail, (tail / n) ** 0.5),
        ("uniform: mean - 1/2", totals[6] / n, 0.0, (1 / 12 / n) ** 0.5),
        ("uniform: variance", totals[7] / n, 1 / 12, (1 / 180 / n) ** 0.5),
    )
    rows_of_table = [(name, f"{value:.3e}", f"{(value - mean) / sd:+.1f}") for name, value, mean, sd in exact]
    return [("numbers", f"{n:.2e}", ""), *rows_of_table]


def measure_steps(options: argparse.Namespace, device: torch.device, backend: str) -> list[tuple[str, str, str]]:
    """Returns rows of a table: a layer, the median time of its training step in ms, and the ratio to a layer without
    noise.
    """
    x = torch.randn(options.steps, options.rows, options.neurons, device=device).add_(0.8).requires_grad_()
    gradient = torch.randn_like(x)
    layers = {name: FlexSN(core, 1, 1, 1, backend=backend) for name, core in LAYERS.items()}

    def train(layer: FlexSN) -> None:
        layer.reset()
        x.grad = None
        torch.autograd.backward(layer(x), gradient)

    times: dict[str, list[float]] = {name: [] for name in layers}
    for layer in layers.values():
        train(layer)
    for _ in range(options.rounds):
        for name, layer in layers.items():
            times[name].append(milliseconds(lambda layer=layer: train(layer), device, warmup=2, rep=10))  # type: ignore[misc]
    plain = times["no noise"]
    return [
        (
            name,
            f"{statistics.median(values):.3f}",
            f"{statistics.median(a / b for a, b in zip(values, plain, strict=True)):.2f}",
        )
        for name, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "noise.md")
    parser.add_argument("--numbers", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--neurons", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "triton" if device.type == "cuda" else "cpp"
    shape = f"[{options.steps}, {options.rows}, {options.neurons}]"
    lines = [
        "# Random numbers inside of a step",
        "",
        describe_machine(device),
        "",
        "Statistics of random numbers, and their distances from the exact values in standard deviations:",
        "",
        *table(("statistic", "value", "distance"), measure_moments(int(options.numbers), device, backend)),
        "",
        f"Training steps of a LIF neuron on {shape} float32, forward and backward, medians in ms; the rows alternate:",
        "",
        *table(("noise", "ms", "ratio"), measure_steps(options, device, backend)),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
