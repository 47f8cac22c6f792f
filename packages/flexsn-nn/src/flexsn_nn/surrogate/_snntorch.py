"""Factories of snnTorch that `_two_ways` does not contain.

The surrogates that these factories return fire if `x > 0`, and have the gradients of snnTorch 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_nn.surrogate._base import Surrogate
from flexsn_nn.surrogate._endless import StraightThrough
from flexsn_nn.surrogate._one_sided import LeakyKReLU
from flexsn_nn.surrogate._power import SparseFastSigmoid

CustomGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


def straight_through_estimator() -> StraightThrough:
    """Returns a surrogate with `g'(x) = 1`."""
    return StraightThrough(strict=True)


def heaviside() -> LeakyKReLU:
    """Returns a surrogate with `g'(x) = 1` for a spike, otherwise 0."""
    return LeakyKReLU(leak=0.0, strict=True)


def LSO(slope: float = 0.1) -> LeakyKReLU:
    """Returns the leaky spike operator: `g'(x) = 1` for a spike, otherwise `slope`."""
    return LeakyKReLU(leak=slope, strict=True)


def SFS(slope: float = 25.0, B: float = 1.0) -> SparseFastSigmoid:
    """Returns `SparseFastSigmoid(slope, B, strict=True)`."""
    return SparseFastSigmoid(slope, B, strict=True)


def custom_surrogate(custom_surrogate_function: CustomGradient) -> Surrogate:
    """Returns a surrogate for a function that computes the gradient of `x`.

    Args:
        custom_surrogate_function: elementwise function `f(x, grad, spikes) -> gradient of x` that consists of plain
            tensor operations. `grad` is the gradient of the spikes.
    """
    return _Custom(custom_surrogate_function, strict=True)


@dataclass(frozen=True)
class _Custom(Surrogate):
    """A surrogate whose gradient is a function of `x`, the spikes' gradient and the spikes."""

    function: CustomGradient

    def gradient(self, x: Tensor) -> Tensor:
        return self.backward(x, torch.ones_like(x))

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        return self.function(x, grad, self.fired(x).to(x.dtype))
