"""Differences of spikes and gradients on a GPU from the eager loop, in 10^9 element-steps of each neuron.

    python benchmarks/scan_exactness.py [--output FILE] [--steps 100] [--elements 1000000] [--seeds 10]

For even seeds, inputs are random. For odd seeds, the input of every other step is chosen so that the membrane potential
is within a few float32 ulps of the threshold, where a result that is rounded differently would flip the spike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import describe_machine, publish, table
from scan_models import CHANNELS
from torch import Tensor

from flexsn_hop import eager_scan_final_state
from flexsn_nn import FlexSN
from flexsn_nn.neuron import IF, LIF, ParametricLIF

THRESHOLD = 1.0
NEAR = 2.0**-20
HEADER = [
    "neuron",
    "element-steps",
    f"within {NEAR:.0e} of the threshold",
    "spikes",
    "spikes that differ",
    "final states that differ",
    "gradients, run to run",
    "gradients, to the loop",
]


def compute_if_input(neuron: FlexSN, v: Tensor) -> Tensor:
    return THRESHOLD - v


def compute_lif_input(neuron: FlexSN, v: Tensor) -> Tensor:
    return 2.0 * THRESHOLD - v


def compute_plif_input(neuron: FlexSN, v: Tensor) -> Tensor:
    assert isinstance(neuron, ParametricLIF)
    return v + (THRESHOLD - v) / torch.sigmoid(neuron.w.detach())


# By name: the neuron, and a function that returns the input that brings the membrane potential to the threshold.
NEURONS: dict[str, tuple[Callable[[], FlexSN], Callable[[FlexSN, Tensor], Tensor]]] = {
    "LIF": (LIF, compute_lif_input),
    "IF": (IF, compute_if_input),
    "PLIF": (lambda: ParametricLIF(init_tau=torch.linspace(1.5, 8.0, CHANNELS)), compute_plif_input),
}


@dataclass
class Counts:
    """Comparisons with the loop, over all seeds of a neuron.

    Attributes:
        total: number of element-steps.
        near: number of membrane potentials near the threshold.
        spikes: number of spikes.
        wrong_spikes: number of spikes that differ.
        wrong_states: number of final states that differ.
        repeated: True if the gradients of two runs are equal to the last bit.
        errors: largest relative differences of gradients.
    """

    total: int = 0
    near: int = 0
    spikes: int = 0
    wrong_spikes: int = 0
    wrong_states: int = 0
    repeated: bool = True
    errors: list[float] = field(default_factory=list)


@torch.no_grad()
def approach_threshold(neuron: FlexSN, to_threshold: Callable[[FlexSN, Tensor], Tensor], x: Tensor) -> Tensor:
    """Replaces every other step of `x` by an input that brings the membrane potential close to the threshold, and
    returns `x`.
    """
    v = torch.zeros_like(x[0])
    for t, step in enumerate(x):
        if t % 2:
            exact = to_threshold(neuron, v)
            ulps = torch.randint(-3, 4, exact.shape, device=x.device, dtype=torch.int32)
            step.copy_((exact.view(torch.int32) + ulps).view(torch.float32))
        _, v = neuron.core(step, v)
    return x


@torch.no_grad()
def count_near_threshold(neuron: FlexSN, x: Tensor) -> int:
    """Counts the membrane potentials that are near the threshold after the input and before the reset. (If a neuron
    does not spike, this potential is also its state after the step.)
    """
    v, count = torch.zeros_like(x[0]), 0
    for step in x:
        spike, after = neuron.core(step, v)
        charged = torch.where(spike > 0, _compute_charge(neuron, step, v), after)
        count += int(((charged - THRESHOLD).abs() <= NEAR).sum())
        v = after
    return count


def _compute_charge(neuron: FlexSN, x: Tensor, v: Tensor) -> Tensor:
    if isinstance(neuron, IF):
        return v + x
    if isinstance(neuron, ParametricLIF):
        return v + (x - v) * torch.sigmoid(neuron.w)
    return v + (x - v) / 2.0


def compute_gradients(neuron: FlexSN, x: Tensor, grad: Tensor, *, loop: bool) -> Sequence[Tensor]:
    neuron.reset()
    spikes = run_loop(neuron, x)[0] if loop else neuron(x)
    assert isinstance(spikes, Tensor)
    return torch.autograd.grad(spikes, [x, *neuron.parameters()], grad)


def run_loop(neuron: FlexSN, x: Tensor) -> tuple[Tensor, Tensor]:
    spikes, v = eager_scan_final_state(neuron.core, 1, 1, 1, x, torch.zeros_like(x[0]))
    return spikes, v


def compare(name: str, seed: int, shape: tuple[int, ...], device: torch.device, counts: Counts) -> None:
    torch.manual_seed(seed)
    make, to_threshold = NEURONS[name]
    neuron = make().to(device)
    neuron.backend = "triton"
    x = torch.randn(shape, device=device) + 0.6
    if seed % 2:
        x = approach_threshold(neuron, to_threshold, x)
        counts.near += count_near_threshold(neuron, x)
    with torch.no_grad():
        spikes, (v, expected) = neuron(x), (neuron.states[0], run_loop(neuron, x))
    counts.total += x.numel()
    counts.spikes += int(spikes.sum(dtype=torch.float64))
    counts.wrong_spikes += int((spikes != expected[0]).sum())
    counts.wrong_states += int((v != expected[1]).sum())
    x.requires_grad_()
    grad = torch.randn_like(x)
    first, second = (compute_gradients(neuron, x, grad, loop=False) for _ in range(2))
    counts.repeated &= all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if seed == 1:
        x_of_part = x.detach()[:, : shape[1] // 8].clone().requires_grad_()
        our_gradients, loop = (
            compute_gradients(neuron, x_of_part, grad[:, : shape[1] // 8], loop=loop) for loop in (False, True)
        )
        counts.errors += [float((a - b).abs().max() / b.abs().max()) for a, b in zip(our_gradients, loop, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scan_exactness.md")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to test this script")
    options = parser.parse_args()
    device = torch.device(options.device)
    # The number of elements must not be a multiple of a block.
    shape = (options.steps, -(-options.elements // CHANNELS), CHANNELS)
    rows = []
    for name in NEURONS:
        counts = Counts()
        for seed in range(options.seeds):
            compare(name, seed, shape, device, counts)
        repeated = "bit-equal" if counts.repeated else "differ"
        error = f"{max(counts.errors, default=0.0):.1e}"
        counts_of_rows = (counts.total, counts.near, counts.spikes, counts.wrong_spikes, counts.wrong_states)
        rows.append([name, *(f"{n:,}".replace(",", " ") for n in counts_of_rows), repeated, error])
    lines = [
        "# Exactness, float32",
        "",
        f"`python benchmarks/scan_exactness.py`: T = {options.steps}, {shape[1] * shape[2]} elements, {options.seeds}",
        "seeds, compared with the eager loop on the same device. The last column is the largest difference of the",
        "gradients of the input and the parameters, relative to the largest gradient.",
        describe_machine(device),
        "",
        *table(HEADER, rows),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
