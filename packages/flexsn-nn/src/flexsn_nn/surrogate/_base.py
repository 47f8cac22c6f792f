"""Base class of surrogates: the step function in the forward, and a chosen derivative in the backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from flexsn_nn._checks import Range, check_number
from flexsn_nn.errors import ParameterError


@dataclass(frozen=True)
class Surrogate(ABC):
    """The step function `s = 1 if x >= 0 else 0`, with the derivative `gradient(x)` instead of 0.

    Surrogates are immutable, equal if their parameters are equal, and usable in any step function on every backend. To
    write your own surrogate, derive a frozen dataclass and define `gradient` with plain tensor operations.

    The parameters are numbers. A tensor as a parameter raises an error, because it would get no gradient.

    Args:
        strict: True if a spike needs `x > 0` instead of `x >= 0`.

    Raises:
        ParameterError: a parameter is a tensor.

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

    def __post_init__(self) -> None:
        for name in () if torch.compiler.is_compiling() else type(self).__dataclass_fields__:
            _refuse_tensor(name, getattr(self, name))

    def __call__(self, x: Tensor) -> Tensor:
        """Computes spikes with the shape and dtype of `x`: 1 if `x >= 0` (`x > 0` if `strict`), otherwise 0.

        Args:
            x: membrane minus threshold, any shape, floating point.
        """
        # Dynamo cannot trace a function with a `jvp`.
        step = _Step if torch.compiler.is_compiling() else _StepBothWays
        spikes: Tensor = step.apply(x, self)
        return spikes

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """Computes the derivative `g'(x)` for the backward, elementwise."""

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Computes the gradient of `x` from the gradient of the spikes: `grad g'(x)`."""
        return grad * self.gradient(x)

    def fired(self, x: Tensor) -> Tensor:
        """Returns booleans, which are True for a spike: `x >= 0`, or `x > 0` if `strict`."""
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
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.surrogate.backward(x, grads[0]), None


class _StepBothWays(_Step):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, surrogate: None) -> Tensor:
        (x,) = ctx.saved_tensors
        # The function is elementwise, so forward-mode differentiation multiplies by the same derivative.
        spikes: Tensor = ctx.surrogate.backward(x, tangent)
        return spikes


def check_parameter(name: str, value: float, **limits: Unpack[Range]) -> None:
    """Raises `ParameterError` unless a surrogate's parameter is a number in its range.

    Args:
        name, limits: arguments of `check_number`.
        value: the parameter.
    """
    _refuse_tensor(name, value)
    check_number(name, value, **limits)


def _refuse_tensor(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        raise ParameterError(
            f"{name} of a surrogate is a tensor of shape {list(value.shape)}, which would get no gradient: give a "
            f"number, such as float({name}). To learn it, write the spikes as hard.detach() + (soft - soft.detach()): "
            'see "A parameter that is learned" in docs/surrogates.md.'
        )
