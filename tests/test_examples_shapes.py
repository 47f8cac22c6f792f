"""`examples/shapes.py`: kernels equal the loop, neurons follow their equations, and layers learn."""

from __future__ import annotations

import pytest
import torch
from scripts import load, one_thread

shapes = load("examples/shapes.py")


@pytest.mark.long(all_but=["winner takes all"])
@pytest.mark.parametrize("kind", ["dendritic", "excitatory and inhibitory", "winner takes all"])
def test_kernels_equal_the_loop(kind: str) -> None:
    torch.manual_seed(0)
    layer = shapes.layers("torch")[kind].double()
    x = 2 * torch.rand(12, 3, shapes.NEURONS, dtype=torch.float64)
    reference = [layer(x), *layer.states]
    layer.reset()
    layer.backend = "cpp"
    for actual, expected in zip([layer(x), *layer.states], reference, strict=True):
        torch.testing.assert_close(actual, expected)


def test_one_neuron_of_a_row_wins() -> None:
    layer = shapes.WinnerTakesAll(backend="torch")
    spikes = layer(2 * torch.rand(30, 5, 9, generator=torch.Generator().manual_seed(0)))
    assert spikes.sum(-1).max() == 1
    assert spikes.sum() > 30


def test_inhibitory_neurons_reduce_spikes() -> None:
    torch.manual_seed(0)
    layer = shapes.ExcitatoryInhibitory(12, 3, backend="torch")
    x = 3 * torch.rand(40, 4, 12)
    with torch.no_grad():
        inhibited = layer(x).sum()
        layer.reset()
        layer.back.zero_()
        uninhibited = layer(x).sum()
    assert inhibited < uninhibited


@one_thread()
@pytest.mark.parametrize("kind", ["dendritic", "excitatory and inhibitory", "winner takes all"])
def test_layer_learns(kind: str) -> None:
    layer = shapes.layers("torch")[kind]
    losses, accuracy = shapes.train(layer, 16, 20, 0, torch.device("cpu"))
    assert losses[-1] < 0.75 * losses[0]
    assert accuracy > 0.75
