"""Surrogates whose derivatives decay like a power of `x`, so that the gradient reaches far from the threshold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate, check_parameter


@dataclass(frozen=True)
class SoftSign(Surrogate):
    """`g'(x) = 1 / (2 alpha (1/alpha + abs(x))²)`, `alpha > 0`."""

    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        distance = 1 / self.alpha + x.abs()
        return 1 / (2 * self.alpha * distance * distance)


@dataclass(frozen=True)
class SuperSpike(Surrogate):
    """`g'(x) = alpha / (1 + abs(x))²`, `alpha > 0`."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        distance = 1 + x.abs()
        return self.alpha / (distance * distance)


@dataclass(frozen=True)
class FastSigmoid(Surrogate):
    """`g'(x) = 1 / (1 + slope abs(x))²`, `slope > 0`."""

    slope: float = 25.0

    def __post_init__(self) -> None:
        check_parameter("slope", self.slope, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        distance = 1 + self.slope * x.abs()
        return 1 / (distance * distance)


@dataclass(frozen=True)
class SparseFastSigmoid(Surrogate):
    """`g'(x) = 1 / (1 + slope abs(x))²` where `x > B`, otherwise 0; `slope > 0`.

    Source: Perez-Nieves and Goodman, "Sparse spiking gradient descent", NeurIPS 2021, with the window of
    snnTorch's `SFS`.
    """

    slope: float = 25.0
    B: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("slope", self.slope, above=0)
        check_parameter("B", self.B)

    def gradient(self, x: Tensor) -> Tensor:
        distance = 1 + self.slope * x.abs()
        return (x > self.B).to(x.dtype) / (distance * distance)


@dataclass(frozen=True)
class NonzeroSignLogAbs(Surrogate):
    """`g'(x) = 1 / (1/alpha + abs(x))`, `alpha > 0`."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        return 1 / (1 / self.alpha + x.abs())


@dataclass(frozen=True)
class QPseudoSpike(Surrogate):
    """`g'(x) = (1 + 2 abs(x) / (alpha - 1))^(-alpha)`, `alpha > 1`."""

    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=1)

    def gradient(self, x: Tensor) -> Tensor:
        return (1 + (2 / (self.alpha - 1)) * x.abs()) ** (-self.alpha)


@dataclass(frozen=True)
class FakeNumericalGradient(Surrogate):
    """`g'(x) = min(sign(x) / x, alpha)`, `alpha > 0`: the slope of the chord from `(0, 0)` to `(x, sign(x))`."""

    alpha: float = 0.3

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, above=0)

    def gradient(self, x: Tensor) -> Tensor:
        # sign(x) / x equals 1 / abs(x). For 0, the former is nan, and the latter is inf.
        return (1 / x.abs()).clamp(max=self.alpha)


def soft_sign(x: Tensor, alpha: float = 2.0, *, strict: bool = False) -> Tensor:
    """Returns `SoftSign(alpha, strict=strict)(x)`."""
    return SoftSign(alpha, strict=strict)(x)


def super_spike(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `SuperSpike(alpha, strict=strict)(x)`."""
    return SuperSpike(alpha, strict=strict)(x)


def nonzero_sign_log_abs(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor:
    """Returns `NonzeroSignLogAbs(alpha, strict=strict)(x)`."""
    return NonzeroSignLogAbs(alpha, strict=strict)(x)


def q_pseudo_spike(x: Tensor, alpha: float = 2.0, *, strict: bool = False) -> Tensor:
    """Returns `QPseudoSpike(alpha, strict=strict)(x)`."""
    return QPseudoSpike(alpha, strict=strict)(x)


def fake_numerical_gradient(x: Tensor, alpha: float = 0.3, *, strict: bool = False) -> Tensor:
    """Returns `FakeNumericalGradient(alpha, strict=strict)(x)`."""
    return FakeNumericalGradient(alpha, strict=strict)(x)
