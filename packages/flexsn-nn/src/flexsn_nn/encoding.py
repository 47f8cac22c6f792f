"""Encoders: from values to spike trains `[T, *shape of the values]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexsn_nn._checks import check_count, check_name, check_tensor
from flexsn_nn.errors import InputDtypeError

__all__ = ["direct", "latency", "rate"]


def rate(x: Tensor, num_steps: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Bernoulli spikes, each step by itself: 1 with probability `x`, the discrete Poisson process.

    Args:
        x: probabilities, floating point; below 0 counts as 0, above 1 as 1.
        num_steps: `T`.
        generator: of `x`'s device; `None`: PyTorch's global one.

    Returns:
        `[T, *x.shape]` of `x`'s dtype. No gradient flows to `x`.

    Example:
        >>> rate(torch.tensor([0.0, 1.0]), 3).tolist()
        [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    """
    _check(x, num_steps)
    # In float32 also for half precision, where few different numbers would be drawn.
    dtype = torch.promote_types(x.dtype, torch.float32)
    draws = torch.rand((num_steps, *x.shape), generator=generator, dtype=dtype, device=x.device)
    return (draws < x).to(x.dtype)


def latency(x: Tensor, num_steps: int, *, curve: str = "linear") -> Tensor:
    """One spike per value, the earlier the larger the value.

        linear: t = (T - 1) (1 - x)
        log:    t = (T - 1) - ln(alpha x + 1),  alpha = exp(T - 1) - 1

    rounded to a step, half to even.

    Args:
        x: values, floating point; below 0 counts as 0 (the last step), above 1 as 1 (the first step).
        num_steps: `T`.
        curve: `"linear"` or `"log"`.

    Returns:
        `[T, *x.shape]` of `x`'s dtype. No gradient flows to `x`.

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
        # ln(alpha x + 1) is softplus(ln(alpha) + ln(x)), and that does not overflow.
        log_alpha = last + math.log1p(-math.exp(-last))
        times = last - softplus(log_alpha + values.log())
    steps = torch.arange(num_steps, device=x.device).view(-1, *[1] * x.dim())
    return (steps == times.round()).to(x.dtype)


def direct(x: Tensor, num_steps: int) -> Tensor:
    """The values themselves at every step: `[T, *x.shape]`, a view that takes no memory.

    The first layer then learns its own encoding. Gradients flow to `x`.

    Args:
        x: values, floating point.
        num_steps: `T`.

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
