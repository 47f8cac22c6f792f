"""A scale and a shift of a neuron's input that its step computes itself, so that the sequence is never written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Affine(NamedTuple):
    """What a neuron does with its first input before anything else: `(x - mean) scale + shift`.

    It is computed in the dtype of these tensors, and rounded to that of `x`. Each broadcasts to the step: for a value
    per channel of `[B, C, H, W]`, the shape is `[C, 1, 1]`.

    Attributes:
        mean, scale, shift: of one shape, dtype and device. Gradients flow to those that require one.
    """

    mean: Tensor
    scale: Tensor
    shift: Tensor

    def of(self, x: Tensor) -> Tensor:
        """`(x - mean) scale + shift`, shaped like `x`: steps or whole sequences."""
        return ((x.to(self.mean.dtype) - self.mean) * self.scale + self.shift).to(x.dtype)

    def absorbed(self, x: Tensor) -> tuple[Tensor, Affine]:
        """What a step takes in."""
        return x, self

    def frozen(self) -> Affine:
        return self


class Producer(Protocol):
    """What a neuron's step can do with its first input."""

    def of(self, x: Tensor) -> Tensor:
        """What the step's input is, computed beforehand."""

    def absorbed(self, x: Tensor) -> tuple[Tensor, Affine]:
        """`x`, and what the step is to do with it."""

    def frozen(self) -> Producer:
        """The same, and using it changes nothing."""


class StandIns:
    """A function of tensors that it captures, for kernels: they are given with each call.

    A trace finds tensors that stand for them and that never change, so that nothing is traced again.

    Args:
        like: tensors with the shapes, dtypes and devices of those to come.
        learned: for each, whether a gradient may flow to it.
    """

    def __init__(self, like: Sequence[Tensor], learned: Sequence[bool]) -> None:
        self.stand_ins = tuple(
            torch.zeros_like(tensor, memory_format=torch.contiguous_format).requires_grad_(flows)
            for tensor, flows in zip(like, learned, strict=True)
        )

    def instead(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The tensors of a call, by the ids of those that stand for them."""
        return {id(a): b.contiguous() for a, b in zip(self.stand_ins, tensors, strict=True)}


class Behind(StandIns):
    """`core` behind an affine function of its first input.

    Args:
        core: the step.
        like: an affine function whose tensors have the shape, dtype and device of those to come, and whose mean
            requires a gradient if theirs do.
    """

    def __init__(self, core: Callable[..., Any], like: Affine) -> None:
        super().__init__(like, (like.mean.requires_grad, True, True))
        self.core = core
        self.__name__: str = getattr(core, "__name__", type(core).__name__)

    def __call__(self, x: Tensor, *rest: Tensor) -> Any:
        mean, scale, shift = self.stand_ins
        return self.core(Affine(mean, scale, shift).of(x), *rest)


def behind(core: Callable[..., Any], affine: Affine) -> Callable[..., Any]:
    """`core` behind an affine function whose tensors it captures, for graphs."""
    mean, scale, shift = affine

    def step(x: Tensor, *rest: Tensor) -> Any:
        return core(Affine(mean, scale, shift).of(x), *rest)

    return step
