"""Bell-shaped surrogates: derivatives of smooth steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class Sigmoid(Surrogate):
    """`g'(x) = alpha σ(alpha x) (1 - σ(alpha x))`, `alpha > 0`."""

    alpha: float = 4.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        soft = torch.sigmoid(self.alpha * x)
        return self.alpha * soft * (1 - soft)


@dataclass(frozen=True)
class ATan(Surrogate):
    """`g'(x) = alpha / 2 / (1 + (pi/2 alpha x)²)`, `alpha > 0`."""

    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        scaled = (math.pi / 2 * self.alpha) * x
        return (self.alpha / 2) / (1 + scaled * scaled)


@dataclass(frozen=True)
class Erf(Surrogate):
    """`g'(x) = alpha / sqrt(pi) exp(-alpha² x²)`, `alpha > 0`."""

    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        scaled = self.alpha * x
        return (self.alpha / math.sqrt(math.pi)) * torch.exp(-(scaled * scaled))


@dataclass(frozen=True)
class Tanh(Surrogate):
    """`g'(x) = 1 - tanh²(k x)`, `k > 0`."""

    k: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("k", self.k, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        soft = torch.tanh(self.k * x)
        return 1 - soft * soft


def erf(x: Tensor, alpha: float = 2.0, *, strict: bool = False) -> Tensor:
    """Returns `Erf(alpha, strict=strict)(x)`."""
    return Erf(alpha, strict=strict)(x)


def tanh(x: Tensor, k: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `Tanh(k, strict=strict)(x)`."""
    return Tanh(k, strict=strict)(x)
