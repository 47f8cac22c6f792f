"""Step functions that several benchmarks share, written as users would write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SigmoidSpike(torch.autograd.Function):
    """A Heaviside step of `x`, which is 1 at 0. Its surrogate gradient is the derivative of `sigmoid(4 x)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(4.0 * x)
        return grad * 4.0 * soft * (1.0 - soft)


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a LIF step: `h = v + (x - v) / 2`, a spike if `h >= 1`, and a hard reset to 0."""
    h = v + (x - v) / 2.0
    spike: Tensor = SigmoidSpike.apply(h - 1.0)
    return spike, h * (1.0 - spike)
