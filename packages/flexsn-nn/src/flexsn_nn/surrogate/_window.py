"""Surrogates with a window around the threshold, outside of which the derivative is zero or constant, and `Tent`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class PiecewiseQuadratic(Surrogate):
    """`g'(x) = max(0, alpha - alpha² abs(x))`, a triangle; `alpha > 0`."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        return (self.alpha - self.alpha**2 * x.abs()).clamp(min=0)


Triangular = PiecewiseQuadratic


@dataclass(frozen=True)
class Tent(Surrogate):
    """`g'(x) = height` for `x < 0`, otherwise `-height`: the slopes of a tent with its top at the threshold.

    Source: snnTorch's `triangular(threshold=height)`.
    """

    height: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("height", self.height)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, self.height, torch.full_like(x, -self.height))


@dataclass(frozen=True)
class Rect(Surrogate):
    """`g'(x) = alpha` where `abs(x) < 0.5 / alpha`, otherwise 0; `alpha > 0`."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        return self.alpha * (x.abs() < 0.5 / self.alpha).to(x.dtype)


@dataclass(frozen=True)
class PiecewiseLeakyReLU(Surrogate):
    """`g'(x) = 1 / (2 w)` where `abs(x) <= w`, otherwise `c`; `w > 0`, `c >= 0`."""

    w: float = 1.0
    c: float = 0.01

    def __post_init__(self) -> None:
        check_parameter("w", self.w, above=0)
        check_parameter("c", self.c, at_least=0)

    def gradient(self, x: Tensor) -> Tensor:
        # `full_like` is necessary, because `where` with two numbers would round them to the default dtype.
        return torch.where(x.abs() <= self.w, 1 / (2 * self.w), torch.full_like(x, self.c))


def piecewise_quadratic(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `PiecewiseQuadratic(alpha, strict=strict)(x)`."""
    return PiecewiseQuadratic(alpha, strict=strict)(x)


def rect(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `Rect(alpha, strict=strict)(x)`."""
    return Rect(alpha, strict=strict)(x)


def piecewise_leaky_relu(x: Tensor, w: float = 1.0, c: float = 0.01, *, strict: bool = False) -> Tensor:
    """Returns `PiecewiseLeakyReLU(w, c, strict=strict)(x)`."""
    return PiecewiseLeakyReLU(w, c, strict=strict)(x)
