"""Limits learned parameters to a range, with a gradient that leads them back into this range."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import Range


def within(value: Tensor, **limits: Unpack[Range]) -> Tensor:
    """Returns `value` within the limits. Outside of the limits, returns the nearest allowed number of the dtype.

    The gradient passes unchanged, even at the limits and beyond them. If an optimizer has moved a number out of its
    range, later steps can therefore move it back. (The gradient of `clamp` is 0 beyond its limits. Since torch 2.15,
    the gradient of `clamp` is also 0 at the limits.) Steps can also move the number further away from its range. In
    that case, the result does not change. To keep the number near its range, call `number.clamp_(0, 1)` under
    `torch.no_grad()` after `optimizer.step()`. The order of this function's backward and of the sums over steps and
    elements does not matter, so compiled kernels give the gradients of the loop.

    The limit `above` is an exception. Close to it, most formulas have a pole (`x / tau`, `log(beta)`), where the
    gradient is infinite. At `above` and below it, the gradient is 0 unless `finite=True`.

    Args:
        value: floating-point tensor of any shape.
        limits: `at_least`, `above`, `at_most`, `below`, each a number or absent. The nearest number above 0 is the
            smallest normal number, and the nearest number below 1 is 1 - eps / 2. `finite=True` declares that the
            formulas that use the result have finite derivatives close to `above`.

    Returns:
        A tensor with the shape and dtype of `value`.

    Example:
        >>> beta = torch.tensor([-0.25, 0.5], requires_grad=True)
        >>> within(beta, at_least=0, at_most=1).sum().backward()
        >>> within(beta, at_least=0, at_most=1).tolist(), beta.grad.tolist()
        ([0.0, 0.5], [1.0, 1.0])
    """
    info = torch.finfo(value.dtype)
    low, high = limits.get("at_least"), limits.get("at_most")
    # An open limit is 0 or 1. The nearest number above 0 is the smallest normal number. The nearest number below 1 is
    # `1 - eps / 2`.
    if "above" in limits:
        low = limits["above"] + info.tiny
    if "below" in limits:
        high = limits["below"] - info.eps / 2
    if low is None and high is None:
        return value
    pole = None if limits.get("finite") else limits.get("above")
    # Dynamo cannot trace a function with a `jvp`.
    function = _Nearest if torch.compiler.is_compiling() else _NearestBothWays
    nearest: Tensor = function.apply(value, low, high, pole)
    return nearest


class _Nearest(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, low: float | None, high: float | None, pole: float | None) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, _, _, ctx.pole = inputs
        if ctx.pole is not None:
            ctx.save_for_backward(value)
            ctx.save_for_forward(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _mask_below_pole(ctx, grads[0]), None, None, None


class _NearestBothWays(_Nearest):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return _mask_below_pole(ctx, tangent.clone())


def _mask_below_pole(ctx: Any, grad: Tensor) -> Tensor:
    if ctx.pole is None:
        return grad
    (value,) = ctx.saved_tensors
    return torch.where(value > ctx.pole, grad, 0.0)
