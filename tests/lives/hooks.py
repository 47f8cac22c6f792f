"""Hooks that users add. They record values, change values, or raise errors. All of them can be copied and pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LoggingHook:
    """Base of hooks that write to a log.

    Attributes:
        log: recorded values.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []


class LogSums(LoggingHook):
    """A forward hook that records the sums of outputs."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for value in output if isinstance(output, list | tuple) else [output]:
            self.log.append((tuple(value.shape), float(value.detach().double().sum())))


class Scale:
    """A forward hook that halves the tensor that a layer returns."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return output / 2 if isinstance(output, Tensor) else None


class ScaleInput:
    """A forward pre-hook that doubles the first input."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return 2 * inputs[0], *inputs[1:]


class SetAttribute:
    """A forward pre-hook that sets an attribute, as weight norm does."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        module.hook_calls = getattr(module, "hook_calls", 0) + 1  # type: ignore[assignment]


class HalveGradient:
    """A full backward hook that halves the gradients of the inputs of a layer."""

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if g is None else g / 2 for g in grad_input)


class Interrupted(Exception):
    """Error that `Interrupt` raises in the middle of a call."""


class Interrupt:
    """A forward pre-hook that raises `Interrupted`."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        raise Interrupted


def negate(gradient: Tensor | None) -> Tensor | None:
    """Negates a gradient, as a hook of a tensor. For functions with several results, torch passes `None` as the
    gradient of an unused result.
    """
    return None if gradient is None else torch.neg(gradient)
