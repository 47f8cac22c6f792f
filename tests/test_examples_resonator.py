"""`examples/resonator.py`: the neuron follows its equation and prefers its own period, and a network learns."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from scripts import load, one_thread

resonator = load("examples/resonator.py")
CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
def test_state_rotates_in_the_complex_plane(backend: str, interpreted: None) -> None:
    omega, decay = 0.7, 0.98
    x = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    neuron = resonator.Resonator(torch.tensor([omega], dtype=torch.float64), decay, backend=backend)
    spikes = neuron(x.view(-1, 1))
    z, expected = 0j, []
    for value in x.tolist():
        z = decay * cmath.exp(1j * omega) * z + value
        expected.append(float(z.imag >= 1.0))
        z = 0j if expected[-1] else z
    assert spikes.flatten().tolist() == expected
    assert 0 < sum(expected) < 30
    assert neuron.state("u").item() == pytest.approx(z.real)
    assert neuron.state("v").item() == pytest.approx(z.imag)


def test_neuron_prefers_its_own_period() -> None:
    counts = resonator.selectivity(240, CPU)
    assert counts.argmax(1).tolist() == [0, 1, 2, 3]
    assert counts.diagonal().min() >= 4


@one_thread()
def test_network_learns_rhythms() -> None:
    result = resonator.train(steps=80, updates=40, seed=0, device=CPU)
    assert result.accuracy > 0.6  # there are four classes, so guesses would reach 0.25
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert result.moved > 0.001  # training also changes omega
    assert math.isfinite(result.moved)
