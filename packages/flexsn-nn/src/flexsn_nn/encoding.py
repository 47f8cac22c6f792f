"""Encoders: functions that map values `[*shape]` to sequences `[T, *shape]`, such as spike trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexsn_nn._checks import check_count, check_name, check_tensor
from flexsn_nn.errors import InputDtypeError

__all__ = ["direct", "latency", "rate"]


def rate(x: Tensor, num_steps: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws a spike with probability `x` at each step, independently of all other steps.

    Such a Bernoulli process is the discrete form of a Poisson process.

    Args:
        x: probabilities, floating point. Values below 0 count as 0, and values above 1 as 1.
        num_steps: number of steps `T`.
        generator: random generator on the device of `x`; `None` for PyTorch's global generator.

    Returns:
        `[T, *x.shape]` with the dtype of `x`. No gradient flows to `x`.

    Example:
        >>> rate(torch.tensor([0.0, 1.0]), 3).tolist()
        [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    """
    _check(x, num_steps)
    # Numbers are drawn in float32 even for half precision, because few numbers in [0, 1) exist in half precision.
    dtype = torch.promote_types(x.dtype, torch.float32)
    draws = torch.rand((num_steps, *x.shape), generator=generator, dtype=dtype, device=x.device)
    return (draws < x).to(x.dtype)


def latency(x: Tensor, num_steps: int, *, curve: str = "linear") -> Tensor:
    """Encodes each value as one spike. The larger the value, the earlier the spike.

        linear: t = (T - 1) (1 - x)
        log:    t = (T - 1) - ln(alpha x + 1),  alpha = exp(T - 1) - 1

    The time is rounded to a whole step, with halves rounded to even.

    Args:
        x: values, floating point. Values below 0 count as 0 (last step), and values above 1 count as 1 (first step).
        num_steps: number of steps `T`.
        curve: `"linear"` or `"log"`.

    Returns:
        `[T, *x.shape]` with the dtype of `x`. No gradient flows to `x`.

    Example:
        >>> latency(torch.tensor([0.0, 0.5, 1.0]), 3).tolist()
        [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    _check(x, num_steps)
    check_name("curve", curve, ("linear", "log"))
    last = num_steps - 1
    values = x.detach().clamp(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    if curve == "linear" or last == 0:
        times = last * (1 - values)
    else:
        # ln(alpha x + 1) equals softplus(ln(alpha) + ln(x)), which does not overflow.
        log_alpha = last + math.log1p(-math.exp(-last))
        times = last - softplus(log_alpha + values.log())
    steps = torch.arange(num_steps, device=x.device).view(-1, *[1] * x.dim())
    return (steps == times.round()).to(x.dtype)


def direct(x: Tensor, num_steps: int) -> Tensor:
    """Repeats the values at every step. The result, `[T, *x.shape]`, is a view of `x`, without new memory.

    If the first layer of the network has weights, the layer learns its own encoding. Gradients flow to `x`.

    Args:
        x: values, floating point.
        num_steps: number of steps `T`.

    Example:
        >>> direct(torch.tensor([0.25, 0.5]), 2).tolist()
        [[0.25, 0.5], [0.25, 0.5]]
    """
    _check(x, num_steps)
    return x.expand(num_steps, *x.shape)


def _check(x: Tensor, num_steps: int) -> None:
    check_count("num_steps", num_steps)
    check_tensor("x", x)
    if not x.is_floating_point():
        raise InputDtypeError(
            f"x is {x.dtype}; encoders take floating-point values in [0, 1]: x.float() / 255 for an image of bytes."
        )
