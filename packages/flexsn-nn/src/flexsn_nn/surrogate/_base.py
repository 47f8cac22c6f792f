"""A surrogate: the step function forward, a chosen derivative backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate(ABC):
    """The step `s = 1 if x >= 0 else 0`, with the derivative `gradient(x)` where the true one is 0.

    Surrogates are values: immutable, equal when their parameters are, usable in any step function on every
    backend. To write one, derive a frozen dataclass and define `gradient` from plain tensor ops.

    Args:
        strict: whether a spike needs `x > 0` instead of `x >= 0`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Gauss(Surrogate):
        ...     width: float = 0.5
        ...     def gradient(self, x):
        ...         return torch.exp(-((x / self.width) ** 2))
        >>> x = torch.tensor([-0.5, 0.0], requires_grad=True)
        >>> spikes = Gauss()(x)
        >>> spikes.sum().backward()
        >>> spikes.tolist(), x.grad.tolist()
        ([0.0, 1.0], [0.3678794503211975, 1.0])
    """

    strict: bool = field(default=False, kw_only=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Spikes: 1 where `x >= 0` (`x > 0` if `strict`), else 0, in the shape and dtype of `x`.

        Args:
            x: membrane minus threshold, any shape, floating point.
        """
        spikes: Tensor = _Step.apply(x, self)
        return spikes

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """The derivative used backward, `g'(x)`, elementwise."""

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `x`, from that of the spikes: `grad g'(x)`."""
        return grad * self.gradient(x)

    def fired(self, x: Tensor) -> Tensor:
        """Where a spike is, as booleans: `x >= 0`, `x > 0` if `strict`."""
        return x > 0 if self.strict else x >= 0


class _Step(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, surrogate: Surrogate) -> Tensor:
        return surrogate.fired(x).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Surrogate], output: Tensor) -> None:
        x, ctx.surrogate = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.surrogate.backward(x, grads[0]), None
