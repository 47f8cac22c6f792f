"""Scale and shift of a neuron's input. The step applies both, so the scaled sequence is never written to memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexsn_runtime import Completion


class FrontParts(NamedTuple):
    """Dependencies of a `Producer` in one call, collected before the producer runs.

    Attributes:
        key: key that is equal for functions that differ only in their tensors.
        tensors: the tensors of `Absorbed.tensors`, in order. A computed tensor is represented by the tensor from
            which it is computed.
        more: other tensors that the function reads or changes.
        compute: function that computes the first of `Absorbed.tensors` in calls with an equal key. Its arguments are
            the detached `x`, `tensors` and `more`. It also changes the tensors of `more` that a regular call would
            change. `None` if no tensor is computed.
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    more: tuple[Tensor, ...] = ()
    compute: Callable[..., tuple[Tensor, ...]] | None = None


class Affine(NamedTuple):
    """Function that a neuron applies to its first input before its step: `(x - mean) scale + shift`.

    The function is computed in the dtype of its tensors, and the result is rounded to the dtype of `x`. Each tensor
    broadcasts to the step. For example, a tensor with one value per channel of `[B, C, H, W]` has the shape
    `[C, 1, 1]`.

    Attributes:
        mean, scale, shift: tensors of one shape, dtype and device. Gradients flow to the tensors that require grad.
    """

    mean: Tensor
    scale: Tensor
    shift: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Returns `(x - mean) scale + shift`, shaped like `x`, for single steps or whole sequences."""
        return ((x.to(self.mean.dtype) - self.mean) * self.scale + self.shift).to(x.dtype)

    def absorbed(self, x: Tensor) -> tuple[Tensor, Affine]:
        """Returns `x` and this function, which the step computes."""
        return x, self

    def parts(self) -> FrontParts:
        return FrontParts((Affine, self.kind), self)

    def frozen(self) -> Affine:
        return self

    @property
    def completion(self) -> None:
        return None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self

    @property
    def learned(self) -> tuple[bool, ...]:
        return self.mean.requires_grad, True, True

    def with_tensors(self, *tensors: Tensor) -> Affine:
        return Affine(*tensors)

    @property
    def kind(self) -> Hashable:
        mean = self.mean
        return mean.shape, mean.dtype, mean.device, mean.requires_grad


class AffineOfStatistics(NamedTuple):
    """The affine part of a norm, computed from its statistics: `(x - mean) scale + bias`.

    The step also computes `scale = weight / sqrt(var + eps)`, at almost no cost. Outside of the step, this scale would
    take three small operations per call, and three more for its gradient.

    Attributes:
        mean, var, weight, bias: `[C]`. Gradients flow to `weight` and `bias`.
        eps: epsilon of the norm.
        trailing_dims: number of dimensions of the step that follow the channels.
        completion: formula for the part of the gradient of `x` that flows through the statistics. The indices of the
            formula are positions in `tensors`. `None` if no gradient flows through the statistics, or if the autograd
            graph of the statistics computes this part.
    """

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    trailing_dims: int
    completion: Completion | None = None

    def of(self, x: Tensor) -> Tensor:
        """Applies the function, like `Affine.of`."""
        if self.completion is not None:
            x, self = self.joined(x)
        mean, var, weight, bias = (tensor.view(-1, *(1,) * self.trailing_dims) for tensor in self.tensors)
        return Affine(mean, torch.rsqrt(var + self.eps) * weight, bias).of(x)

    def absorbed(self, x: Tensor) -> tuple[Tensor, AffineOfStatistics]:
        return x, self

    def parts(self) -> FrontParts | None:
        return None

    def joined(
        self, x: Tensor, reduced: Callable[[list[Tensor]], list[Tensor]] | None = None
    ) -> tuple[Tensor, AffineOfStatistics]:
        """Returns `x` and an equal function, whose autograd graph completes the gradient of `x`.

        See `Completion.joined`.
        """
        assert self.completion is not None
        x, tensors = self.completion.joined(x, self.tensors, reduced)
        return x, self.with_tensors(*tensors)

    def frozen(self) -> AffineOfStatistics:
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:4]

    @property
    def learned(self) -> tuple[bool, ...]:
        return False, False, True, True

    def with_tensors(self, *tensors: Tensor) -> AffineOfStatistics:
        mean, var, weight, bias = tensors
        return AffineOfStatistics(mean, var, weight, bias, self.eps, self.trailing_dims)

    @property
    def kind(self) -> Hashable:
        mean, _, weight, bias, eps, trailing_dims, _ = self
        return mean.shape, mean.dtype, mean.device, weight.dtype, bias.dtype, eps, trailing_dims


class Producer(Protocol):
    """Function that a neuron's step can apply to its first input."""

    def of(self, x: Tensor) -> Tensor:
        """Applies the function to `x` before the step runs."""

    def absorbed(self, x: Tensor) -> tuple[Tensor, Absorbed]:
        """Returns `x` and the function that the step applies to it."""

    def parts(self) -> FrontParts | None:
        """Returns the function's dependencies in the next call, or `None` if calls cannot be compared."""

    def frozen(self) -> Producer:
        """Returns a function with equal results that can be used without side effects."""


class Absorbed(Producer, Protocol):
    """Function that a step itself applies to its first input."""

    @property
    def completion(self) -> Completion | None:
        """Completion of the gradient of `x`, with indices into `tensors`; `None` if the gradient is complete."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that the function captures."""

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each captured tensor, True if a gradient may flow to it."""

    def with_tensors(self, *tensors: Tensor) -> Absorbed:
        """Returns this function with other captured tensors."""

    @property
    def kind(self) -> Hashable:
        """Key of the trace. Functions with equal keys share one trace."""
