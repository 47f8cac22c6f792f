"""Accuracies and times of spikes: comparison with loops and with snnTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_nn import ParameterError, metrics

T, B, C = 7, 40, 6


def draw(rate: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    spikes = (torch.rand(T, B, C, generator=generator) < rate).float()
    return spikes, torch.randint(C, (B,), generator=generator)


def test_accuracy_compares_counts_of_spikes() -> None:
    spikes, targets = draw()
    num_correct = 0
    for b in range(B):
        counts = [int(spikes[:, b, c].sum()) for c in range(C)]
        num_correct += counts.index(max(counts)) == int(targets[b])
    assert metrics.accuracy(spikes, targets).item() == pytest.approx(num_correct / B)
    assert 0 < num_correct < B
    assert metrics.accuracy(spikes.bool(), targets).item() == pytest.approx(num_correct / B)
    assert metrics.accuracy(spikes.half(), targets).item() == pytest.approx(num_correct / B)


def test_accuracy_of_populations_sums_their_neurons() -> None:
    spikes, targets = draw()
    targets = targets % 3
    expected = metrics.accuracy(spikes.unflatten(2, (3, 2)).sum(3), targets)
    assert torch.equal(metrics.accuracy(spikes, targets, num_classes=3), expected)
    with pytest.raises(ParameterError, match="6 neurons are not a population code of 4 classes"):
        metrics.accuracy(spikes, targets, num_classes=4)


def test_first_spikes_equal_those_of_a_loop() -> None:
    spikes, targets = draw(0.1)
    times = metrics.time_to_first_spike(spikes)
    num_correct = 0
    for b in range(B):
        first_times = [next((t for t in range(T) if spikes[t, b, c]), T) for c in range(C)]
        assert times[b].tolist() == first_times
        num_correct += min(first_times) < T and first_times.index(min(first_times)) == int(targets[b])
    assert metrics.first_spike_accuracy(spikes, targets).item() == pytest.approx(num_correct / B)
    assert 0 < num_correct < B
    assert metrics.first_spike_accuracy(torch.zeros(3, 2, 4), torch.zeros(2, dtype=torch.long)).item() == 0
    assert metrics.time_to_first_spike(-spikes).tolist() == times.tolist()


def test_results_equal_those_of_snntorch() -> None:
    theirs: Any = pytest.importorskip("snntorch.functional.acc")
    spikes, targets = draw()
    assert metrics.accuracy(spikes, targets).item() == pytest.approx(theirs.accuracy_rate(spikes, targets))
    targets = targets % 3
    assert metrics.accuracy(spikes, targets, num_classes=3).item() == pytest.approx(
        theirs.accuracy_rate(spikes, targets, population_code=True, num_classes=3)
    )
    # snnTorch treats a silent neuron like a neuron that spikes in the last step, so no neuron is silent here.
    spikes[-1] = 1
    assert metrics.first_spike_accuracy(spikes, targets).item() == pytest.approx(
        theirs.accuracy_temporal(spikes.clone(), targets)
    )


@pytest.mark.parametrize("shape", [(T, B), (T, B + 1, C), (0, B, C), (T, B, 0)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    _, targets = draw()
    for metric in (metrics.accuracy, metrics.first_spike_accuracy):
        with pytest.raises(ParameterError, match=r"expected \[T, B, C\] and \[B\]"):
            metric(torch.zeros(shape), targets)
    with pytest.raises(ParameterError, match="T >= 1"):
        metrics.time_to_first_spike(torch.zeros(0, 3))
