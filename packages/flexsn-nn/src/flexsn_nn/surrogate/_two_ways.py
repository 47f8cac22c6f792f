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
    """Returns the spikes of `Sigmoid(alpha)` if `x` is a tensor; otherwise a strict `Sigmoid(slope)`."""
    if isinstance(x, Tensor):
        _check_absent("slope", slope, "without x, which makes a surrogate as snnTorch does")
        return Sigmoid(_replace_none(alpha, 4.0), strict=bool(strict))(x)
    _check_absent("alpha", alpha, "with x; snnTorch's parameter is slope")
    return Sigmoid(_select("slope", x, slope, 25.0), strict=strict is not False)


@overload
def atan(x: Tensor, alpha: float = 2.0, *, strict: bool = False) -> Tensor: ...
@overload
def atan(x: float | None = None, /, *, alpha: float = 2.0, strict: bool = True) -> ATan: ...
def atan(x: Tensor | float | None = None, alpha: float | None = None, *, strict: bool | None = None) -> Tensor | ATan:
    """Returns the spikes of `ATan(alpha)` if `x` is a tensor; otherwise a strict `ATan(alpha)`."""
    if isinstance(x, Tensor):
        return ATan(_replace_none(alpha, 2.0), strict=bool(strict))(x)
    return ATan(_select("alpha", x, alpha, 2.0), strict=strict is not False)


@overload
def fast_sigmoid(x: Tensor, slope: float = 25.0, *, strict: bool = False) -> Tensor: ...
@overload
def fast_sigmoid(x: float | None = None, /, *, slope: float = 25.0, strict: bool = True) -> FastSigmoid: ...
def fast_sigmoid(
    x: Tensor | float | None = None, slope: float | None = None, *, strict: bool | None = None
) -> Tensor | FastSigmoid:
    """Returns the spikes of `FastSigmoid(slope)` if `x` is a tensor; otherwise a strict `FastSigmoid(slope)`."""
    if isinstance(x, Tensor):
        return FastSigmoid(_replace_none(slope, 25.0), strict=bool(strict))(x)
    return FastSigmoid(_select("slope", x, slope, 25.0), strict=strict is not False)


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
    """Returns the spikes of `SpikeRateEscape` if `x` is a tensor; otherwise a strict `SpikeRateEscape`."""
    if isinstance(x, Tensor):
        return SpikeRateEscape(_replace_none(beta, 1.0), _replace_none(slope, 25.0), strict=bool(strict))(x)
    if x is not None and beta is not None:  # two positional numbers are beta and slope
        return SpikeRateEscape(x, _select("slope", beta, slope, 25.0), strict=strict is not False)
    return SpikeRateEscape(_select("beta", x, beta, 1.0), _replace_none(slope, 25.0), strict=strict is not False)


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
    """Returns the spikes of `Triangular(alpha)` if `x` is a tensor; otherwise a strict `Tent(threshold)`.

    The gradients of the two surrogates differ: snnTorch's gradient changes its sign at the threshold.
    """
    if isinstance(x, Tensor):
        _check_absent("threshold", threshold, "without x, which makes a surrogate as snnTorch does")
        return PiecewiseQuadratic(_replace_none(alpha, 1.0), strict=bool(strict))(x)
    _check_absent("alpha", alpha, "with x; snnTorch's parameter is threshold")
    return Tent(_select("threshold", x, threshold, 1.0), strict=strict is not False)


def _replace_none(value: float | None, default: float) -> float:
    return default if value is None else value


def _select(name: str, first: float | None, named: float | None, default: float) -> float:
    """Returns the value of a parameter that is passed by position or by name, or the default if it is not passed."""
    if first is not None and named is not None:
        raise TypeError(f"{name} is given twice, by position and by name.")
    return _replace_none(first, _replace_none(named, default))


def _check_absent(name: str, value: float | None, call: str) -> None:
    if value is not None:
        raise TypeError(f"{name} belongs to the call {call}.")
