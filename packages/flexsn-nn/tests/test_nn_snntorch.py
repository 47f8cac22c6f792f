"""Neurons with snnTorch's names: comparison with snnTorch in spikes, states and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import Alpha, Lapicque, Leaky, Synaptic
from flexsn_nn.neuron import Neuron

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

snntorch = pytest.importorskip("snntorch")

MECHANISMS = ("subtract", "zero", "none")
# Each entry has arguments whose values are exact in float32, since snnTorch stores them in float32, and the names of
# learned parameters, which are equal in snnTorch. (Alpha and Lapicque of snnTorch 1.0 fail with learned parameters.)
NEURONS: dict[str, tuple[type[Neuron], dict[str, Any], list[str]]] = {
    "Leaky": (Leaky, {"beta": 0.75, "learn_beta": True, "learn_threshold": True}, ["beta", "threshold"]),
    "Synaptic": (
        Synaptic,
        {"alpha": 0.5, "beta": 0.75, "learn_alpha": True, "learn_beta": True, "learn_threshold": True},
        ["alpha", "beta", "threshold"],
    ),
    "Alpha": (Alpha, {"alpha": 0.75, "beta": 0.5}, []),
    "Lapicque": (Lapicque, {"R": 2.0, "C": 4.0}, []),
}


def run_theirs(theirs: Any, x: Tensor, num_states: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    states = tuple(torch.zeros_like(x[0]) for _ in range(num_states))
    spikes = []
    for step in x:
        spike, *new_states = theirs(step, *states)
        states = tuple(new_states)
        spikes.append(spike)
    return torch.stack(spikes).double(), states


def compare_results(results: list[tuple[Tensor, tuple[Tensor, ...]]], leaves_by_result: list[list[Tensor]]) -> None:
    gradients = []
    for (spikes, states), leaves in zip(results, leaves_by_result, strict=True):
        weights = torch.linspace(-1, 1, spikes.numel(), dtype=spikes.dtype).reshape(spikes.shape)
        loss = (spikes * weights).sum() + sum(state.square().sum() for state in states)
        gradients.append(torch.autograd.grad(loss, leaves))
    assert torch.equal(results[0][0], results[1][0])
    # snnTorch's spikes are float32, so the gradients of the spikes are float32, too.
    for ours, theirs in zip((*results[0][1], *gradients[0]), (*results[1][1], *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.long(
    all_but=[
        "torch-Lapicque-none",
        "torch-Leaky-subtract",
        "torch-Synaptic-zero",
        "torch-Alpha-none",
        "triton-Lapicque-zero",
    ]
)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_neurons_equal_those_of_snntorch(name: str, mechanism: str, backend: str) -> None:
    kind, arguments, learned = NEURONS[name]
    arguments = {**arguments, "threshold": 0.375, "reset_mechanism": mechanism}
    ours = kind(**arguments, backend=backend).double()
    theirs = getattr(snntorch, name)(**arguments).double()
    x = torch.randn(11, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.3
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    spikes, states = ours.step(x_ours)
    assert 0.05 < spikes.mean() < 0.95, "some neurons should fire and some should not"
    compare_results(
        [(spikes, tuple(states)), run_theirs(theirs, x_theirs, ours.num_states)],
        [
            [x_ours, *(getattr(ours, parameter) for parameter in learned)],
            [x_theirs, *(getattr(theirs, parameter) for parameter in learned)],
        ],
    )
