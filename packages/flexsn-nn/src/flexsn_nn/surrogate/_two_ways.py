"""Functions that can be called with `x`, or without `x`, like the factories of the same names in snnTorch.

`fast_sigmoid(x, slope)` returns spikes. `fast_sigmoid(slope=25)` returns a surrogate with snnTorch's gradient and
defaults. As in snnTorch, this surrogate fires if `x > 0`, unless `strict=False`.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate
from flexsn_nn.surrogate._bell import ATan, Sigmoid
from flexsn_nn.surrogate._exponential import SpikeRateEscape
from flexsn_nn.surrogate._power import FastSigmoid
from flexsn_nn.surrogate._window import PiecewiseQuadratic, Tent


@overload
def sigmoid(x: Tensor, alpha: float = 4.0, *, strict: bool = False) -> Tensor: ...
@overload
def sigmoid(x: float | None = None, /, *, slope: float = 25.0, strict: bool = True) -> Sigmoid: ...
def sigmoid(
    x: Tensor | float | None = None,
    alpha: float | None = None,
    *,
    slope: float | None = None,
    strict: bool | None = None,
) -> Tensor | Sigmoid:
    """Returns spikes of `Sigmoid(alpha)` for `sigmoid(x, alpha)`; a strict `Sigmoid(slope)` for `sigmoid(slope=25)`."""
    if isinstance(x, Tensor):
        _absent("slope", slope, "without x, which makes a surrogate as snnTorch does")
        return Sigmoid(_or(alpha, 4.0), strict=bool(strict))(x)
    _absent("alpha", alpha, "with x; snnTorch's parameter is slope")
    return Sigmoid(_either("slope", x, slope, 25.0), strict=strict is not False)


@overload
def atan(x: Tensor, alpha: float = 2.0, *, strict: bool = False) -> Tensor: ...
@overload
def atan(x: float | None = None, /, *, alpha: float = 2.0, strict: bool = True) -> ATan: ...
def atan(x: Tensor | float | None = None, alpha: float | None = None, *, strict: bool | None = None) -> Tensor | ATan:
    """Returns spikes of `ATan(alpha)` for `atan(x, alpha)`; a strict `ATan(alpha)` for `atan(alpha=2)`."""
    if isinstance(x, Tensor):
        return ATan(_or(alpha, 2.0), strict=bool(strict))(x)
    return ATan(_either("alpha", x, alpha, 2.0), strict=strict is not False)


@overload
def fast_sigmoid(x: Tensor, slope: float = 25.0, *, strict: bool = False) -> Tensor: ...
@overload
def fast_sigmoid(x: float | None = None, /, *, slope: float = 25.0, strict: bool = True) -> FastSigmoid: ...
def fast_sigmoid(
    x: Tensor | float | None = None, slope: float | None = None, *, strict: bool | None = None
) -> Tensor | FastSigmoid:
    """Returns spikes of `FastSigmoid(slope)` if `x` is a tensor; otherwise a strict `FastSigmoid`."""
    if isinstance(x, Tensor):
        return FastSigmoid(_or(slope, 25.0), strict=bool(strict))(x)
    return FastSigmoid(_either("slope", x, slope, 25.0), strict=strict is not False)


@overload
def spike_rate_escape(x: Tensor, beta: float = 1.0, slope: float = 25.0, *, strict: bool = False) -> Tensor: ...
@overload
def spike_rate_escape(
    x: float | None = None, beta: float | None = None, slope: float | None = None, *, strict: bool = True
) -> SpikeRateEscape: ...
def spike_rate_escape(
    x: Tensor | float | None = None,
    beta: float | None = None,
    slope: float | None = None,
    *,
    strict: bool | None = None,
) -> Tensor | SpikeRateEscape:
    """Returns spikes of `SpikeRateEscape` if `x` is a tensor; otherwise a strict `SpikeRateEscape`."""
    if isinstance(x, Tensor):
        return SpikeRateEscape(_or(beta, 1.0), _or(slope, 25.0), strict=bool(strict))(x)
    if x is not None and beta is not None:  # two positional numbers are beta and slope
        return SpikeRateEscape(x, _either("slope", beta, slope, 25.0), strict=strict is not False)
    return SpikeRateEscape(_either("beta", x, beta, 1.0), _or(slope, 25.0), strict=strict is not False)


@overload
def triangular(x: Tensor, alpha: float = 1.0, *, strict: bool = False) -> Tensor: ...
@overload
def triangular(x: float | None = None, /, *, threshold: float = 1.0, strict: bool = True) -> Tent: ...
def triangular(
    x: Tensor | float | None = None,
    alpha: float | None = None,
    *,
    threshold: float | None = None,
    strict: bool | None = None,
) -> Tensor | Surrogate:
    """Returns spikes of `Triangular(alpha)` for `triangular(x, alpha)`; a strict `Tent` for `triangular(threshold=1)`.

    The gradients of the two surrogates differ: snnTorch's gradient changes its sign at the threshold.
    """
    if isinstance(x, Tensor):
        _absent("threshold", threshold, "without x, which makes a surrogate as snnTorch does")
        return PiecewiseQuadratic(_or(alpha, 1.0), strict=bool(strict))(x)
    _absent("alpha", alpha, "with x; snnTorch's parameter is threshold")
    return Tent(_either("threshold", x, threshold, 1.0), strict=strict is not False)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _either(name: str, first: float | None, named: float | None, default: float) -> float:
    """Returns a parameter that may be passed by position or by name."""
    if first is not None and named is not None:
        raise TypeError(f"{name} is given twice, by position and by name.")
    return _or(first, _or(named, default))


def _absent(name: str, value: float | None, belongs: str) -> None:
    if value is not None:
        raise TypeError(f"{name} belongs to the call {belongs}.")
