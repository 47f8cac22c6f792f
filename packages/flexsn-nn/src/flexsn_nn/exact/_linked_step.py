"""A step that also writes its spikes in bfloat16 and the gradient of its input in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Largest finite bfloat16 number. Larger float32 numbers would become infinite in bfloat16.
_LARGEST = 3.3895313892515355e38


class LinkedStep:
    """`core` with additional inputs, outputs and states, so that kernels exchange spikes and gradients with products.

    The step is `(x, *links, *states, total) -> (*outputs, spikes, *new_states, total)`. `spikes` is the first output in
    bfloat16. The gradient of `x` only flows to the links: each of the `parts` links receives one bfloat16 part of this
    gradient. The gradient of the initial state `total` is the sum of this gradient over time.

    Args:
        core: step with one input.
        num_outputs: number of outputs of `core`.
        writes: True if the step returns `spikes`.
        parts: number of links.
        sums: True if the step has the state `total`.
    """

    def __init__(self, core: Callable[..., Any], num_outputs: int, writes: bool, parts: int, sums: bool) -> None:
        self.core, self.num_outputs = core, num_outputs
        self.writes, self.parts, self.sums = writes, parts, sums
        self.__name__: str = getattr(core, "__name__", type(core).__name__)

    def __call__(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        links, states = rest[: self.parts], rest[self.parts :]
        total_state: tuple[Tensor, ...] = ()
        if self.sums:
            *states, total = states  # type: ignore[assignment]
            total_state = (total,)
        if self.parts:
            x = _LinkedFunction.apply(x, *total_state, *links)
        returned = self.core(x, *states)
        results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        spikes = (results[0].to(torch.bfloat16),) if self.writes else ()
        return (*results[: self.num_outputs], *spikes, *results[self.num_outputs :], *total_state)


class _LinkedFunction(torch.autograd.Function):
    """Returns `x`. Each float32 target receives the gradient of `x`, and each other target one part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *targets: Tensor) -> Tensor:
        ctx.dtypes = [target.dtype for target in targets]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        remainder, gradients = grad, []
        for dtype in ctx.dtypes:
            if dtype == torch.float32:
                gradients.append(grad)
                continue
            finite = torch.where(remainder.abs() == torch.inf, remainder, remainder.clamp(-_LARGEST, _LARGEST))
            part = finite.to(torch.bfloat16)
            gradients.append(part)
            represented = part.to(torch.float32)
            remainder = torch.where(represented == remainder, 0.0, remainder - represented)
        return None, *gradients
