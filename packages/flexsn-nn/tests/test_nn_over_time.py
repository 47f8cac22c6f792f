"""Layers without state over the steps of a sequence."""

from __future__ import annotations

import torch
from torch import nn

from flexsn_nn import OverTime


def test_every_step_alone_gives_the_same() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(5, 4, 2, 8, 8)
    output = OverTime(*layers)(x)
    assert output.shape == (5, 4, 27)
    torch.testing.assert_close(output, torch.stack([layers(step) for step in x]))


def test_no_steps() -> None:
    assert OverTime(nn.Conv1d(2, 3, 3))(torch.zeros(0, 4, 2, 8)).shape == (0, 4, 3, 6)
