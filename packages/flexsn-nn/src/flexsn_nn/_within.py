"""Learned numbers with a range: the nearest number within, and a gradient that leads back into it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import Range


def within(value: Tensor, **limits: Unpack[Range]) -> Tensor:
    """`value` where it is within the limits; elsewhere, the nearest number of its dtype that is.

    The gradient is the one of the result, everywhere, at the limits and beyond them: a number that an optimizer has
    moved out of its range is led back as soon as the loss asks for it. (`clamp` has a gradient of 0 beyond its limits,
    and from torch 2.15 on, at them.) A gradient that points further outside passes, too. It does not change the result,
    and a sum over steps and elements is the same whether it is formed before or after this function, so that compiled
    kernels give the gradients of the loop.

    Args:
        value: floating point, any shape.
        limits: `at_least`, `above`, `at_most`, `below`, each a number or absent. The nearest number above 0 is the
            smallest normal one; below 1, the one next to it.

    Returns:
        A tensor of the shape and dtype of `value`.

    Example:
        >>> beta = torch.tensor([-0.25, 0.5], requires_grad=True)
        >>> within(beta, at_least=0, at_most=1).sum().backward()
        >>> within(beta, at_least=0, at_most=1).tolist(), beta.grad.tolist()
        ([0.0, 0.5], [1.0, 1.0])
    """
    numbers = torch.finfo(value.dtype)
    low, high = limits.get("at_least"), limits.get("at_most")
    # The open ends are 0 and 1: the nearest numbers to them are the smallest normal one, and this one.
    if "above" in limits:
        low = limits["above"] + numbers.tiny
    if "below" in limits:
        high = limits["below"] - numbers.eps / 2
    if low is None and high is None:
        return value
    nearest: Tensor = _Nearest.apply(value, low, high)
    return nearest


class _Nearest(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, low: float | None, high: float | None) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | None, float | None], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.clone()
