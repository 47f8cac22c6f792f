"""`examples/long_sequence.py`: the network learns, and segments of time only change the rounding of its results."""

from __future__ import annotations

import copy

import pytest
import torch
from scripts import load, one_thread

from flexsn_runtime.plans._segments import SegmentRule, using_segments

example = load("examples/long_sequence.py")


@one_thread()
def test_network_learns_tones() -> None:
    torch.manual_seed(0)
    data = example.waves(96, 1600, seed=0)
    network = example.Network(data.classes)
    result = example.train(network, data, epochs=8, seed=0)
    assert sum(result.losses[-3:]) < 0.8 * sum(result.losses[:3])
    assert result.accuracy > 0.5  # guesses would reach 0.25


def test_data_have_the_documented_tones_and_sizes() -> None:
    data = example.waves(40, 1600, seed=1)
    assert data.train_x.shape == data.test_x.shape == (40, 1600)
    for sound, label in zip(data.train_x, data.train_y, strict=True):
        loudest_frequency = int(torch.fft.rfft(sound).abs().argmax()) * example.RATE / 1600
        assert loudest_frequency == example.TONES[label]
    digits = example.pixels(2000, seed=0)
    assert (len(digits.train_x), len(digits.test_x)) == (1437, 360)
    assert digits.train_x.shape[1] == 784
    assert 0.0 <= float(digits.train_x.min()) < float(digits.train_x.max()) <= 2.0


@pytest.mark.long
@one_thread()
@pytest.mark.usefixtures("compiler")
def test_segments_do_not_change_results() -> None:
    torch.manual_seed(0)
    data = example.waves(8, 800, seed=0)
    first = example.Network(data.classes, "cpp")
    second = copy.deepcopy(first)
    losses = []
    for network, rule in ((first, None), (second, SegmentRule(elements=2**11, largest=2**9, steps=32, warm_up=16))):
        optimizer = example.optimizer_of(network)
        with using_segments(rule):
            losses.append([float(example.train_step(network, optimizer, *data[:2])) for _ in range(2)])
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-4)
    assert any("_forward_guess" in name for name in second.hidden.kernel_names())
    assert any("_backward_maps" in name for name in second.hidden.kernel_names())
