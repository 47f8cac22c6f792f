"""Gradients of hand-written backward formulas are either correct or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_eval import check_step
from torch import Tensor

from flexsn_graph import (
    CaptureError,
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    RecurrentTrace,
    UnsupportedCoreError,
    trace_core,
    trace_step,
)

W = torch.nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))
COLUMN = torch.nn.Parameter(torch.linspace(0.5, 1, 3, dtype=torch.float64).view(3, 1))
ROW = torch.nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64).view(1, 3))
SQUARE = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))


def make_function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an autograd function that saves its arguments for `backward(grad, *arguments)`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            ctx.save_for_backward(*arguments)
            return forward(*arguments)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(*grads, *ctx.saved_tensors)

    apply: Callable[..., Any] = Function.apply
    return apply


def make_step(backward: Callable[..., Any], *captured: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """Returns a core whose output is `(x > 0) * captured...` with the given backward."""

    def forward(x: Tensor, *rest: Tensor) -> Tensor:
        result = (x > 0).to(x)
        for tensor in rest:
            result = result * tensor
        return result

    return lambda x, v: (make_function(forward, backward)(x, *captured), v)


def draw_arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)
    return x, v


def masked(grad: Tensor, x: Tensor) -> Tensor:
    grad = grad.clone()
    grad[x.abs() > 0.5] = 0.0
    return grad


RIGHT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum_to_the_parameter": make_step(lambda g, x, w: (g * w, (g * x).sum(0)), W),
    "unreduced": make_step(lambda g, x, w: (g * w, g * x), W),
    "mean": make_step(lambda g, x, w: (g * w, (g * x).mean(0)), W),
    "linear_after_the_sum": make_step(lambda g, x, w: (g, -(g * x).sum(0) * w.exp() / 3.0), W),
    "choice_after_the_sum": make_step(lambda g, x, w: (g, torch.where(w > 0, (g * x).sum(0), 0.0)), W),
    "sums_added": make_step(lambda g, x, w: (g, (g * x).sum(0) + (g * g).sum(0) * w), W),
    "keepdim": make_step(lambda g, x, r: (g * r, (g * x).sum(0, keepdim=True) * r), ROW),
    "no_gradient_for_one": make_step(lambda g, x, w: (g * w, None), W),
    "zeros": make_step(lambda g, x, w: (g * w, torch.zeros_like(w)), W),
    "transposed_and_back": make_step(lambda g, x: (g.t() * x.t()).t()),
    "ignores_the_incoming_gradient": make_step(lambda g, x: torch.ones_like(x)),
    "mask_by_index": make_step(lambda g, x: masked(g, x)),
    "in_place_on_a_copy": make_step(lambda g, x: g.clone().mul_(2.0)),
    "clamp_elementwise": make_step(lambda g, x, w: (g, (g * x).clamp(-0.1, 0.1)), SQUARE),
    "parameter_in_backward_alone": make_step(lambda g, x: g * SQUARE.detach()),
    "transposed_parameter_in_backward_alone": make_step(lambda g, x: g * SQUARE.detach().t()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_formulas_have_autograds_gradients(name: str) -> None:
    check_step(RIGHT[name], draw_arguments(), (1, 1, 1))


NON_LINEAR = "reduces a gradient and then uses it"
NO_SUM = "not a sum over the elements that share it"

REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], type[Exception], str]] = {
    "clamp": (make_step(lambda g, x, w: (g, (g * x).sum(0).clamp(-1, 1)), W), NonPointwiseError, NON_LINEAR),
    "square": (make_step(lambda g, x, w: (g, (g * x).sum(0) ** 2), W), NonPointwiseError, NON_LINEAR),
    "product_of_sums": (
        make_step(lambda g, x, w: (g, (g * x).sum(0) * g.sum(0)), W),
        NonPointwiseError,
        NON_LINEAR,
    ),
    "add_number": (make_step(lambda g, x, w: (g, (g * x).sum(0) + 1), W), NonPointwiseError, NON_LINEAR),
    "add_parameter": (make_step(lambda g, x, w: (g, (g * x).sum(0) + w), W), NonPointwiseError, NON_LINEAR),
    "add_other_axes": (
        make_step(lambda g, x, s: (g, (g * x).sum(0) + g.sum()), W),
        NonPointwiseError,
        "reduces a gradient|not a sum",
    ),
    "centred": (make_step(lambda g, x: g - g.mean()), NonPointwiseError, NON_LINEAR),
    "normalised": (make_step(lambda g, x: g / g.norm()), NonPointwiseError, NON_LINEAR),
    "spread": (make_step(lambda g, x: g.sum(0, keepdim=True).expand(3, 3)), NonPointwiseError, NON_LINEAR),
    "wrong_axis": (make_step(lambda g, x, w: (g, (g * x).sum(1)), W), CaptureError, "two different layouts"),
    "other_axis_of_another": (
        make_step(lambda g, x, r, c: (g, (g * x).sum(0, keepdim=True) * c.t(), None), ROW, COLUMN),
        CaptureError,
        "two different layouts",
    ),
    "transposed_gradient_of_a_parameter": (
        make_step(lambda g, x, w: (g, (g * x).t()), SQUARE),
        CaptureError,
        "two different layouts",
    ),
    "transposed_gradient": (make_step(lambda g, x: (g * x).t()), NonPointwiseError, "moves elements"),
    "flipped": (make_step(lambda g, x: g.flip(0)), NonPointwiseError, "aten.flip"),
    "constant_gradient": (make_step(lambda g, x, w: (g, torch.ones_like(w)), W), NonPointwiseError, NO_SUM),
    "parameter_as_gradient": (make_step(lambda g, x, w: (g, w * 2.0), W), NonPointwiseError, NO_SUM),
    "sum_of_a_constant": (
        make_step(lambda g, x, w: (g, torch.ones_like(x).sum(0)), W),
        NonPointwiseError,
        "the same for all elements",
    ),
    "in_place": (make_step(lambda g, x: g.mul_(2.0)), MutationError, "incoming gradient"),
    "value_of_a_parameter": (
        make_step(lambda g, x, w: (g * w.detach().tolist()[0], None), W),
        DataDependentError,
        "Tensor.tolist|_local_scalar_dense",
    ),
    "random": (make_step(lambda g, x: g * torch.rand_like(x)), RandomOpError, "aten.rand_like"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_formulas_are_refused_with_their_line(name: str) -> None:
    core, error, message = REFUSED[name]
    trace = trace_step(core, 1, 1, 1, draw_arguments())  # only the backward is refused
    with pytest.raises(error, match=message) as caught:
        trace.vjp([True, True], [True] * (2 + len(trace.lifted)))
    assert re.search(r"test_graph_backward_formulas\.py:\d+", str(caught.value)), "no source line"


def test_clamped_gradient_of_a_broadcast_input_is_refused() -> None:
    core = make_function(lambda b: b * 2.0, lambda g, b: g.clamp(-1, 1))
    x, v = draw_arguments()
    trace = trace_step(lambda b, x, v: (x + core(b), v), 2, 1, 1, (x[0], x, v))
    with pytest.raises(NonPointwiseError, match=NON_LINEAR):
        trace.vjp([True, True], [True] * 3)


def test_gradient_of_a_broadcast_input_is_counted_once() -> None:
    core = make_function(lambda b: b * 2.0, lambda g, b: b)
    x, v = draw_arguments()
    trace = trace_step(lambda b, x, v: (x + core(b), v), 2, 1, 1, (x[0], x, v))
    with pytest.raises(NonPointwiseError, match=NO_SUM):
        trace.vjp([True, True], [True] * 3)


def test_function_with_setup_context_and_absent_gradients_has_autograds_gradients() -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return (x > w).to(x), x * w

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, w = ctx.saved_tensors
            total = torch.zeros_like(x) if grads[0] is None else grads[0] * torch.sigmoid(x)
            if grads[1] is None:
                return total, None
            return total + grads[1] * w, grads[1] * x

    def core(x: Tensor, v: Tensor) -> Any:
        return Function.apply(x, W)

    x, v = draw_arguments()
    trace = check_step(core, (x, v), (1, 1, 1))
    assert trace.vjp([True, False], [True] * 3).gradients == (0, None, None)
    assert trace.vjp([False, True], [True] * 3).gradients == (0, None, 1)


def test_constant_gradient_in_a_step_with_products_is_refused() -> None:
    constant = make_function(lambda x, w: x * w, lambda grad, x, w: (grad * w, torch.full_like(w, 2.0)))
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    step = trace_core(lambda x, v: (v, constant(x + v @ SQUARE, W)), 1, 1, 1, (zeros, zeros))
    assert isinstance(step, RecurrentTrace)
    with pytest.raises(UnsupportedCoreError, match="does not depend on the step"):
        step.vjp((True, True), (True,) * 4)
