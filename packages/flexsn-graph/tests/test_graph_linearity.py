"""Linearity of backward formulas in their cotangents, derived from the traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_eval import evaluate
from torch import Tensor

from flexsn_graph import Role, is_linear, linear_part, trace_step

COTANGENTS = (Role.GRAD_OUTPUT, Role.GRAD_STATE)


def with_backward(backward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the identity with a custom backward formula, a function of its argument and the gradient."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return v.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return backward(ctx.saved_tensors[0], grads[0])

    return Identity.apply  # type: ignore[no-any-return]


LINEAR = {
    "a product": lambda v, g: g * torch.exp(v),
    "a sum of terms": lambda v, g: 2.0 * g + torch.sigmoid(v) * g - g / (1.0 + v * v),
    "a selection": lambda v, g: torch.where(v > 0, g, torch.zeros_like(g)),
    "a conversion to bfloat16": lambda v, g: g.to(torch.bfloat16).to(torch.float32),
}
OTHERS = {
    "clipped": lambda v, g: g.clamp(-1.0, 1.0),
    "a sign": lambda v, g: g.sign(),
    "squared": lambda v, g: g * g,
    "a sum with another value": lambda v, g: g + v,
    "a selection of another value": lambda v, g: torch.where(v > 0, g, v),
    "a selection by the gradient": lambda v, g: torch.where(g > 0, g, 0.5 * g),
    "a quotient by the gradient": lambda v, g: v / g,
    "a conversion to integers": lambda v, g: g.to(torch.int32).to(g.dtype),
}


@pytest.mark.parametrize(("formula", "linear"), [*((f, True) for f in LINEAR), *((f, False) for f in OTHERS)])
def test_linearity_of_backward_formulas_is_detected(formula: str, linear: bool) -> None:
    identity = with_backward({**LINEAR, **OTHERS}[formula])

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * identity(v) + x
        return torch.sigmoid(h), h

    trace = trace_step(core, 1, 1, 1, (torch.rand(3), torch.rand(3)))
    assert is_linear(trace.vjp(trace.differentiable, (True, True)), COTANGENTS) == linear


def test_linearity_of_a_step_in_its_state_is_detected() -> None:
    examples = (torch.rand(3), torch.rand(3))
    leaky = trace_step(lambda x, v: (0.5 * v, x * v), 1, 1, 1, examples)
    with_input = trace_step(lambda x, v: (0.5 * v + x, 0.5 * v + x), 1, 1, 1, examples)
    assert is_linear(leaky.forward, (Role.STATE,))
    assert not is_linear(with_input.forward, (Role.STATE,))  # the function is affine


AFFINE = {
    "leaky": lambda x, v, w: (0.5 * v + x - 1.0, v * x - w),
    "selected": lambda x, v, w: (torch.where(x > 0.5, 0.25 * v, x), 1.0 - w * x),
    "mixed": lambda x, v, w: (x * v - torch.exp(x) * w, x - (w - v) / 3.0),
    "a state that depends on the input alone": lambda x, v, w: (x * x, v + w),
}
NOT_AFFINE = {
    "multiplied": lambda x, v, w: (v * w, w),
    "compared": lambda x, v, w: (torch.where(v > 0.5, x, v), w),
    "a function": lambda x, v, w: (torch.tanh(v) + x, w),
    "divided by": lambda x, v, w: (x / v, w),
}


@pytest.mark.parametrize("step", AFFINE)
def test_linear_part_of_an_affine_step_has_no_constant(step: str) -> None:
    def core(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (torch.tanh(v) * x, *AFFINE[step](x, v, w))  # type: ignore[no-untyped-call]

    x, v, w = torch.rand(3, 5, dtype=torch.float64)
    trace = trace_step(core, 1, 2, 1, (x, v, w))
    part = linear_part(trace.forward)
    assert part is not None
    zeros = torch.zeros_like(v)
    expected = [a - b for a, b in zip(AFFINE[step](x, v, w), AFFINE[step](x, zeros, zeros), strict=True)]  # type: ignore[no-untyped-call]
    actual = dict(zip(part.results, evaluate(part.graph, (x, v, w), x.shape), strict=True))
    for i, value in enumerate(expected):
        torch.testing.assert_close(actual.get((Role.STATE, i), zeros), value)  # type: ignore[call-overload]


@pytest.mark.parametrize("step", NOT_AFFINE)
def test_step_that_is_not_affine_has_no_linear_part(step: str) -> None:
    def core(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (v, *NOT_AFFINE[step](x, v, w))  # type: ignore[no-untyped-call]

    assert linear_part(trace_step(core, 1, 2, 1, (torch.rand(5),) * 3).forward) is None


def test_linear_part_belongs_to_the_step_and_not_to_its_gradient() -> None:
    identity = with_backward(lambda v, g: 0.1 * g)
    v = torch.rand(3)
    part = linear_part(trace_step(lambda x, v: (v, 0.5 * identity(v) + x), 1, 1, 1, (v, v)).forward)
    assert part is not None
    torch.testing.assert_close(evaluate(part.graph, (v, v), v.shape)[0], 0.5 * v)
