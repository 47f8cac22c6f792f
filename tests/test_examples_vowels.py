"""`examples/vowels.py`: streams with resets and padded recordings have the same scores, and a network learns delays."""

from __future__ import annotations

import pytest
import torch
from scripts import load, one_thread

vowels = load("examples/vowels.py")
CPU = torch.device("cpu")


def test_stream_separates_recordings_by_silence() -> None:
    torch.manual_seed(0)
    recordings = vowels.made(count=40).train
    x, resets, owners = vowels.stream(recordings)
    for i, (recording, _) in enumerate(recordings):
        t, row = (owners == i).nonzero()[0].tolist()
        assert torch.equal(x[t : t + len(recording), row], recording)
        assert resets[t, row]
        assert bool((owners[t + len(recording) :][: vowels.MOST, row] == -1).all())
    assert int(resets.sum()) == len(recordings)
    assert not x[owners == -1].any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.long(all_but=["torch"])
def test_streams_equal_padded_recordings(backend: str, interpreted: None) -> None:
    torch.manual_seed(0)
    recordings = vowels.made(count=18).train
    net = vowels.Network(4, 4, backend)
    scores = vowels.streamed(net, recordings, CPU)
    assert torch.allclose(scores, vowels.padded(net, recordings, CPU), atol=1e-6)
    assert scores.std() > 0.01


@one_thread()
@pytest.mark.long(all_but=[])
@pytest.mark.parametrize("epochs", [25])
def test_network_learns_the_order_of_pulses(epochs: int) -> None:
    torch.manual_seed(0)
    result = vowels.train(vowels.made(), epochs=epochs)
    assert result.accuracy > 0.7  # there are four classes, so guesses would reach 0.25
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert result.moved > 0.05
    assert result.difference < 1e-4
