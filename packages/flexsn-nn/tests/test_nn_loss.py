"""Losses: comparison with explicit sums."""

from __future__ import annotations

import math

import pytest
import torch

from flexsn_nn import ParameterError, loss

SPIKES = torch.tensor([[[1, 0, 1], [0, 0, 1]], [[1, 1, 0], [0, 1, 1]]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2])


def cross_entropy(scores: list[float], target: int) -> float:
    return math.log(sum(math.exp(score) for score in scores)) - scores[target]


def test_cross_entropies_equal_explicit_sums() -> None:
    rate = [cross_entropy(SPIKES[t, b].tolist(), int(TARGETS[b])) for t in range(2) for b in range(2)]
    assert loss.ce_rate_loss(SPIKES, TARGETS).item() == pytest.approx(sum(rate) / 4)
    count = [cross_entropy([2, 1, 1], 0), cross_entropy([0, 1, 2], 2)]
    assert loss.ce_count_loss(SPIKES, TARGETS).item() == pytest.approx(sum(count) / 2)
    v = SPIKES * torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    peak = [cross_entropy([0.5, 0, 3], 0), cross_entropy([0, 0, 3], 2)]
    assert loss.ce_max_membrane_loss(v, TARGETS).item() == pytest.approx(sum(peak) / 2)


def test_squared_distances_equal_explicit_sums() -> None:
    # The counts are [2, 1, 1] and [0, 1, 2]. The expected count is 2 * 1 for the target, and 0 for the other classes.
    assert loss.mse_count_loss(SPIKES, TARGETS).item() == pytest.approx((0 + 1 + 1 + 0 + 1 + 0) / 6 / 2)
    # The expected counts are 2 * 0.75 and 2 * 0.25.
    squares = [0.5**2, 0.5**2, 0.5**2, 0.5**2, 0.5**2, 0.5**2]
    value = loss.mse_count_loss(SPIKES, TARGETS, correct_rate=0.75, incorrect_rate=0.25)
    assert value.item() == pytest.approx(sum(squares) / 6 / 2)
    # v is 0 everywhere. One of three squared differences is 2 squared, and two are 1 squared.
    v = torch.zeros(4, 2, 3, dtype=torch.float64)
    assert loss.mse_membrane_loss(v, TARGETS, 2.0, -1.0).item() == pytest.approx((4 + 1 + 1) / 3)
    assert loss.mse_membrane_loss(v, torch.full_like(v, 3.0)).item() == pytest.approx(9)


def test_sparsity_counts_spikes_above_the_rate() -> None:
    assert loss.l1_rate_sparsity(SPIKES, 0.5).item() == 3.5
    assert loss.l1_rate_sparsity(SPIKES).item() == pytest.approx(7e-5)


@pytest.mark.parametrize(
    "function",
    [loss.ce_rate_loss, loss.ce_count_loss, loss.ce_max_membrane_loss, loss.mse_count_loss],
)
def test_gradients_pass_gradcheck(function: object) -> None:
    assert callable(function)
    # The values are distinct, so the maximum is differentiable.
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).roll(5).reshape(2, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, TARGETS), (x,))


@pytest.mark.parametrize(
    "function",
    [
        loss.ce_rate_loss,
        loss.ce_count_loss,
        loss.ce_max_membrane_loss,
        loss.mse_count_loss,
        loss.mse_membrane_loss,
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(ParameterError, match=r"shape \[2, 2, 3\] and targets of shape \[3\]; expected"):
        function(SPIKES, torch.tensor([0, 1, 2]))
    with pytest.raises(ParameterError, match=r"shape \[2, 3\]"):
        function(SPIKES[0], TARGETS)
    with pytest.raises(ParameterError, match=r"targets are torch.float32; .*targets\.long\(\)"):
        function(SPIKES, TARGETS.float())


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"correct_rate is 1\.5; it must be at most 1"):
        loss.mse_count_loss(SPIKES, TARGETS, correct_rate=1.5)
    with pytest.raises(ParameterError, match="Lambda is -1"):
        loss.l1_rate_sparsity(SPIKES, -1.0)
