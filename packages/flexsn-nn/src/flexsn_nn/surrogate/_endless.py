"""Surrogates whose derivatives do not decay with the distance from the threshold: a constant and a wave."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn._checks import check_count
from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class StraightThrough(Surrogate):
    """`g'(x) = 1`."""

    def gradient(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@dataclass(frozen=True)
class SquarewaveFourierSeries(Surrogate):
    """`g'(x) = 4/T Σ_{i=1..n} cos((2i - 1) 2 pi x / T)`, with `n >= 1` terms and the period `T > 0`."""

    n: int = 2
    T: float = 8.0

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_parameter("T", self.T, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        phase = (2 * math.pi / self.T) * x
        total = torch.cos(phase)
        for i in range(2, self.n + 1):
            total = total + torch.cos((2 * i - 1) * phase)
        return (4 / self.T) * total


def straight_through(x: Tensor, *, strict: bool = False) -> Tensor:
    """Returns `StraightThrough(strict=strict)(x)`."""
    return StraightThrough(strict=strict)(x)


def squarewave_fourier_series(x: Tensor, n: int = 2, T: float = 8.0, *, strict: bool = False) -> Tensor:
    """Returns `SquarewaveFourierSeries(n, T, strict=strict)(x)`."""
    return SquarewaveFourierSeries(n, T, strict=strict)(x)
