"""Linearity of backward formulas in their cotangents, told from the traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_graph import Role, is_linear, trace_step

COTANGENTS = (Role.GRAD_OUTPUT, Role.GRAD_STATE)


def own(backward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity with a backward formula of its own, of its argument and the gradient."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return v.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return backward(ctx.saved_tensors[0], grads[0])

    return Own.apply  # type: ignore[return-value]


LINEAR = {
    "a product": lambda v, g: g * torch.exp(v),
    "a sum of terms": lambda v, g: 2.0 * g + torch.sigmoid(v) * g - g / (1.0 + v * v),
    "a selection": lambda v, g: torch.where(v > 0, g, torch.zeros_like(g)),
    "of narrow values": lambda v, g: g.to(torch.bfloat16).to(torch.float32),
}
OTHERS = {
    "clipped": lambda v, g: g.clamp(-1.0, 1.0),
    "its sign": lambda v, g: g.sign(),
    "squared": lambda v, g: g * g,
    "with a constant": lambda v, g: g + v,
    "a selection of another": lambda v, g: torch.where(v > 0, g, v),
    "by a condition on it": lambda v, g: torch.where(g > 0, g, 0.5 * g),
    "a quotient by it": lambda v, g: v / g,
    "whole": lambda v, g: g.to(torch.int32).to(g.dtype),
}


@pytest.mark.parametrize(("formula", "linear"), [*((f, True) for f in LINEAR), *((f, False) for f in OTHERS)])
def test_is_linear(formula: str, linear: bool) -> None:
    passed = own({**LINEAR, **OTHERS}[formula])

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * passed(v) + x
        return torch.sigmoid(h), h

    trace = trace_step(core, 1, 1, 1, (torch.rand(3), torch.rand(3)))
    assert is_linear(trace.vjp(trace.differentiable, (True, True)), COTANGENTS) == linear


def test_a_step_is_linear_in_its_state_or_not() -> None:
    given = (torch.rand(3), torch.rand(3))
    leaky = trace_step(lambda x, v: (0.5 * v, x * v), 1, 1, 1, given)
    with_input = trace_step(lambda x, v: (0.5 * v + x, 0.5 * v + x), 1, 1, 1, given)
    assert is_linear(leaky.forward, (Role.STATE,))
    assert not is_linear(with_input.forward, (Role.STATE,))  # affine
