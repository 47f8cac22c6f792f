"""Surrogates whose derivatives decay exponentially."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class PiecewiseExp(Surrogate):
    """`g'(x) = alpha/2 exp(-alpha abs(x))`, `alpha > 0`."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        return (self.alpha / 2) * torch.exp(-self.alpha * x.abs())


@dataclass(frozen=True)
class SpikeRateEscape(Surrogate):
    """`g'(x) = slope exp(-beta abs(x - 1))`, `beta > 0`, `slope > 0`."""

    beta: float = 1.0
    slope: float = 25.0

    def __post_init__(self) -> None:
        check_parameter("beta", self.beta, above=0)
        check_parameter("slope", self.slope, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        return self.slope * torch.exp(-self.beta * (x - 1).abs())


def piecewise_exp(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `PiecewiseExp(alpha, strict=strict)(x)`."""
    return PiecewiseExp(alpha, strict=strict)(x)
