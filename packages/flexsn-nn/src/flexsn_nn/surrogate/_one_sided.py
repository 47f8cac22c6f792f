"""Surrogates with different derivatives below and above the threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class S2NN(Surrogate):
    """`g'(x) = alpha σ(alpha x) (1 - σ(alpha x))` for `x < 0`, otherwise `beta / (x + 1)`; `alpha, beta > 0`."""

    alpha: float = 4.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)
        check_parameter("beta", self.beta, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        soft = torch.sigmoid(self.alpha * x)
        return torch.where(x < 0, self.alpha * soft * (1 - soft), self.beta / (x + 1))


@dataclass(frozen=True)
class LeakyKReLU(Surrogate):
    """`g'(x) = k` for a spike, otherwise `leak`; both parameters are at least 0."""

    leak: float = 0.0
    k: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("leak", self.leak, at_least=0)
        check_parameter("k", self.k, at_least=0)

    def gradient(self, x: Tensor) -> Tensor:
        # `full_like` is necessary, because `where` with two numbers would round them to the default dtype.
        return torch.where(self.fired(x), self.k, torch.full_like(x, self.leak))


@dataclass(frozen=True)
class LogTailedReLU(Surrogate):
    """`g'(x) = alpha` for `x <= 0`, 1 for `0 < x <= 1`, `1 / x` for `x > 1`; `alpha >= 0`."""

    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, at_least=0)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.where(x <= 0, self.alpha, 1 / x.clamp(min=1))


def s2nn(x: Tensor, alpha: float = 4.0, beta: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `S2NN(alpha, beta, strict=strict)(x)`."""
    return S2NN(alpha, beta, strict=strict)(x)


def leaky_k_relu(x: Tensor, leak: float = 0.0, k: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `LeakyKReLU(leak, k, strict=strict)(x)`."""
    return LeakyKReLU(leak, k, strict=strict)(x)


def log_tailed_relu(x: Tensor, alpha: float = 0.0, *, strict: bool = False) -> Tensor:
    """Returns `LogTailedReLU(alpha, strict=strict)(x)`."""
    return LogTailedReLU(alpha, strict=strict)(x)
