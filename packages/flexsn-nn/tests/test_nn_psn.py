"""Parallel neurons: comparison with explicit sums over the steps that each neuron reads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import PSN, MaskedPSN, ParameterError, SlidingPSN, StateError, functional
from flexsn_nn.surrogate import ATan

T, STEP = 6, (2, 5)


def draw() -> Tensor:
    return 4 * torch.randn(T, *STEP, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


def sum_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes `Σ_i weight[t, i] x[i] + bias[t]` in loops."""
    rows = []
    for t in range(T):
        total = torch.zeros_like(x[0]) + bias[t]
        for i in range(T):
            total = total + weight[t, i] * x[i]
        rows.append(total)
    return torch.stack(rows)


def check_against_sums(neuron: nn.Module, weight: Tensor, bias: Tensor) -> None:
    x = draw().requires_grad_()
    spikes = neuron(x)
    h = sum_by_hand(x, weight, bias)
    assert 0.05 < spikes.mean() < 0.95
    assert torch.equal(spikes, (h >= 0).double())
    leaves = [x, *neuron.parameters()]
    weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape)
    expected = torch.autograd.grad((ATan()(h) * weights).sum(), leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad((spikes * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_psn_equals_explicit_sums() -> None:
    torch.manual_seed(2)
    neuron = PSN(T).double()
    check_against_sums(neuron, neuron.weight, neuron.bias)
    assert list(neuron.state_dict()) == ["weight", "bias"]
    with pytest.raises(ParameterError, match="created for T=6 steps"):
        neuron(torch.zeros(5, *STEP))


@pytest.mark.parametrize("lambda_", [0.0, 0.4, 1.0])
def test_masked_psn_equals_explicit_sums(lambda_: float) -> None:
    torch.manual_seed(2)
    neuron = MaskedPSN(2, T, lambda_init=0.1).double()
    neuron.lambda_ = lambda_
    factors = torch.tensor(
        [[1.0 if 0 <= t - i < 2 else 1 - lambda_ for i in range(T)] for t in range(T)], dtype=torch.float64
    )
    check_against_sums(neuron, factors * neuron.weight, neuron.bias)
    assert list(neuron.state_dict()) == ["weight", "bias", "_lambda_"]
    with pytest.raises(ParameterError, match="lambda_ is 2"):
        neuron.lambda_ = 2.0


@pytest.mark.long(all_but=["1-True", "3-False", "9-True"])
@pytest.mark.parametrize("exp_init", [True, False])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_sliding_psn_equals_explicit_sums(k: int, exp_init: bool) -> None:
    torch.manual_seed(2)
    neuron = SlidingPSN(k, exp_init=exp_init).double()
    neuron.weight.data.abs_()
    if exp_init:
        assert neuron.weight.tolist() == [0.5 ** (k - 1 - j) for j in range(k)]
    rows = [
        torch.stack([neuron.weight[k - 1 - (t - i)] if 0 <= t - i < k else torch.zeros(()) for i in range(T)])
        for t in range(T)
    ]
    check_against_sums(neuron, torch.stack(rows), neuron.bias.expand(T))


def test_a_sliding_window_continues_from_call_to_call() -> None:
    neuron = SlidingPSN(3)
    x = draw().float()
    expected = neuron(x)
    neuron.reset()
    assert torch.equal(torch.cat([neuron(x[:1]), neuron(x[1:3]), neuron(x[3:])]), expected)
    functional.reset_net(neuron)
    functional.set_step_mode(neuron, "s")
    assert torch.equal(torch.stack([neuron(step) for step in x]), expected)
    for twin in (copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        assert torch.equal(twin(x[0]), neuron(x[0]))
        neuron.states = twin.states
    with pytest.raises(StateError, match=r"Call reset\(\) between batches"):
        neuron(x[0, :1])
