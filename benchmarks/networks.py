"""Common networks with a choice of activation: `nn.ReLU`, or spiking neurons.

All networks map sequences `[T, B, ...]` to `[T, B, classes]`. Layers other than neurons process T·B frames at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flexsn_nn import OverTime

Activation = Callable[[], nn.Module]


class SEWBlock(nn.Module):
    """Two convolutions with norms, each followed by an activation. The result is added to the input of the block.

    Source: Fang et al., "Deep residual learning in spiking neural networks", NeurIPS 2021. This block is "SEW ADD".
    """

    def __init__(self, before: int, after: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.first = _make_convolution(before, after, 3, stride)
        self.second = _make_convolution(after, after, 3)
        self.first_activation, self.second_activation = activation(), activation()
        self.short = None
        if stride != 1 or before != after:
            self.short = nn.Sequential(_make_convolution(before, after, 1, stride), activation())

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.second_activation(self.second(self.first_activation(self.first(x))))
        return inside + (x if self.short is None else self.short(x))


def make_sew_resnet18(activation: Activation, classes: int = 1000) -> nn.Module:
    """Returns a network that maps `[T, B, 3, 224, 224]` to `[T, B, classes]`."""
    blocks: list[nn.Module] = []
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [SEWBlock(before, after, stride, activation), SEWBlock(after, after, 1, activation)]
        before = after
    return nn.Sequential(
        _make_convolution(3, 64, 7, 2),
        activation(),
        OverTime(nn.MaxPool2d(3, stride=2, padding=1)),
        *blocks,
        OverTime(nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(2),
        nn.Linear(512, classes),
    )


def make_vgg8(activation: Activation, classes: int = 10) -> nn.Module:
    """Returns a network that maps `[T, B, 3, 32, 32]` to `[T, B, classes]`."""
    layers: list[nn.Module] = []
    before = 3
    for after, pooled in ((64, False), (128, True), (256, False), (256, True), (512, False), (512, True)):
        layers += [_make_convolution(before, after, 3), activation()]
        layers += [OverTime(nn.MaxPool2d(2))] if pooled else []
        before = after
    return nn.Sequential(*layers, nn.Flatten(2), nn.Linear(512 * 16, classes))


class SpikingAttention(nn.Module):
    """Attention without a softmax, between activations. It maps `[T, B, width, tokens]` to the same shape.

    Source: Zhou et al., "Spikformer: when spiking neural network meets transformer", ICLR 2023.
    """

    def __init__(self, width: int, heads: int, activation: Activation) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            nn.Sequential(_make_projection(width, width), activation()) for _ in range(3)
        )
        self.gathered = activation()
        self.out = nn.Sequential(_make_projection(width, width), activation())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(2, (self.heads, -1)).transpose(-2, -1) for part in (self.query, self.key, self.value)
        )
        gathered = torch.matmul(query, key.transpose(-2, -1)) @ value * 0.125
        result: Tensor = self.out(self.gathered(gathered.transpose(-2, -1).flatten(2, 3)))
        return result


class SpikformerBlock(nn.Module):
    """Attention and two projections, each of which is added to its input. For the source, see `SpikingAttention`."""

    def __init__(self, width: int, heads: int, activation: Activation) -> None:
        super().__init__()
        self.attention = SpikingAttention(width, heads, activation)
        self.projections = nn.Sequential(
            _make_projection(width, 4 * width), activation(), _make_projection(4 * width, width), activation()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.projections(x)
        return result


class Spikformer(nn.Module):
    """Spikformer blocks on tokens. The network maps `[T, B, width, tokens]` to `[T, B, classes]`."""

    def __init__(self, activation: Activation, width: int = 384, heads: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Sequential(_make_projection(width, width), activation())
        self.blocks = nn.Sequential(*(SpikformerBlock(width, heads, activation) for _ in range(depth)))
        self.classes = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classes(self.blocks(self.tokens(x)).mean(-1))
        return result


def make_feed_forward(activation: Activation, *widths: int) -> nn.Module:
    """Returns a network that maps `[T, B, widths[0]]` to `[T, B, widths[-1]]`."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def _make_convolution(before: int, after: int, kernel: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return OverTime(convolution, nn.BatchNorm2d(after))


def _make_projection(before: int, after: int) -> nn.Module:
    return OverTime(nn.Conv1d(before, after, 1, bias=False), nn.BatchNorm1d(after))
