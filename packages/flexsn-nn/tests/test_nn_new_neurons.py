"""Behaviour of some neurons: refractory periods, spikes of two signs, and random spikes."""

from __future__ import annotations

import pytest
import torch

from flexsn_nn import (
    CLIF,
    LIF,
    InputCountError,
    ParameterError,
    RefractoryLIF,
    StochasticLIF,
    TernaryIF,
    UnknownNameError,
)

pytestmark = pytest.mark.usefixtures("loops")  # Other tests compare kernels with the equations.


def test_refractory_neurons_pause_after_a_spike() -> None:
    x = torch.full((10, 1), 5.0)
    silent = RefractoryLIF(absolute=3, tau=1.0)
    assert silent(x).flatten().tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert RefractoryLIF(absolute=0, tau=1.0)(x).flatten().tolist() == [1] * 10
    assert torch.equal(RefractoryLIF(absolute=0)(x), LIF()(x))
    # The threshold is 1 + 2 r / 4. After a spike it is 3, then 2.5, 2 and 1.5. The input is 2.2.
    raised = RefractoryLIF(absolute=1, relative=4, rise=2.0, tau=1.0)
    assert raised(torch.full((10, 1), 2.2)).flatten().tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]
    per_neuron = RefractoryLIF(absolute=torch.tensor([0.0, 2.0]), tau=1.0)
    assert per_neuron(torch.full((4, 2), 5.0)).T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 1]]
    with pytest.raises(ParameterError, match="give relative above 0"):
        RefractoryLIF(rise=1.0)
    with pytest.raises(ParameterError, match="absolute is -1"):
        RefractoryLIF(absolute=-1)


def test_a_silent_neuron_keeps_its_membrane_and_has_no_gradient() -> None:
    neuron = RefractoryLIF(absolute=2, tau=2.0, v_reset=0.25, store_state_seqs=True)
    x = torch.tensor([[4.0], [9.0], [9.0], [0.0]], requires_grad=True)
    neuron(x)
    v = neuron.state_seq("v")
    assert v is not None
    assert v.flatten().tolist() == [0.25, 0.25, 0.25, 0.25]
    v[2].sum().backward()
    assert x.grad is not None
    assert x.grad[1:].flatten().tolist() == [0, 0, 0]


def test_ternary_spikes_have_two_signs() -> None:
    x = torch.tensor([[0.6], [0.6], [-0.7], [-0.7], [0.0]])
    assert TernaryIF()(x).flatten().tolist() == [0, 1, 0, -1, 0]
    soft = TernaryIF(v_reset=None, store_state_seqs=True)
    assert soft(-x).flatten().tolist() == [0, -1, 0, 1, 0]
    assert soft.state("v") is not None
    with pytest.raises(ParameterError, match="v_threshold is 0; it must be above 0"):
        TernaryIF(v_threshold=0.0)


def test_clif_resets_deeper_after_more_spikes() -> None:
    neuron = CLIF(store_state_seqs=True)
    neuron(torch.full((12, 1), 1.8))
    m = neuron.state_seq("m")
    assert m is not None
    assert m[-1] > m[0] == 1


@pytest.mark.parametrize("kind", ["logistic", "gaussian"])
def test_firing_probabilities_are_as_documented(kind: str) -> None:
    torch.manual_seed(0)
    distance, scale = 0.3, 0.5
    neuron = StochasticLIF(scale=scale, noise=kind, tau=1.0)
    rate = neuron(torch.full((50, 4000), 1.0 - distance)).mean().item()
    z = torch.tensor(-distance / scale)
    expected = torch.sigmoid(z) if kind == "logistic" else torch.special.ndtr(z)
    # Five standard deviations of the mean of 200,000 values are 0.0056.
    assert rate == pytest.approx(expected.item(), abs=0.0056)


def test_noise_is_drawn_again_or_passed() -> None:
    x = torch.rand(20, 30) * 2
    neuron = StochasticLIF(scale=0.5)
    torch.manual_seed(1)
    first = neuron(x)
    neuron.reset()
    second = neuron(x)
    neuron.reset()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    noise = neuron.draw(x)
    assert torch.equal(neuron(x, noise), first)
    neuron.reset()
    assert torch.equal(neuron(x, torch.zeros_like(x)), LIF()(x))
    assert neuron.draw(x.half()).isfinite().all()
    with pytest.raises(UnknownNameError, match="noise"):
        StochasticLIF(noise="logistik")
    with pytest.raises(InputCountError, match="got 3 inputs"):
        neuron(x, x, x)


def test_noise_in_single_steps_equals_noise_of_a_sequence() -> None:
    x = torch.rand(6, 5) * 2
    noise = StochasticLIF().draw(x)
    expected = StochasticLIF()(x, noise)
    steps = StochasticLIF(step_mode="s")
    assert torch.equal(torch.stack([steps(a, n) for a, n in zip(x, noise, strict=True)]), expected)
