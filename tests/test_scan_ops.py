"""Ops of torch that need special care, and ops of another project. Kernels of scans with these ops equal the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import OpCall, pointwise, register_op, supported_ops
from flexsn_graph import OpFacts, TorchError, UnsupportedCoreError, facts_of
from flexsn_nn import FlexSN

pytestmark = pytest.mark.usefixtures("interpreted")

Core = Callable[[Tensor], tuple[Tensor, ...]]


def make_neuron(function: Callable[[Tensor], Tensor], backend: str) -> FlexSN:
    return FlexSN(lambda x: (function(x),), 1, 0, 1, backend=backend)


def differentiate(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    result.sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


EDGES = torch.tensor([-math.inf, -200.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 200.0, math.inf, math.nan])


@pytest.mark.long(all_but=["soft_margin_loss", "logit with eps", "smooth_l1_loss", "hardshrink"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        torch.logit,
        lambda x: torch.logit(x, 0.25),
        lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
        functional.hardshrink,
        functional.softshrink,
    ],
    ids=["soft_margin_loss", "logit", "logit with eps", "smooth_l1_loss", "hardshrink", "softshrink"],
)
def test_gradients_at_the_edges_equal_the_loop(function: Callable[[Tensor], Tensor]) -> None:
    x = EDGES.unsqueeze(0)
    expected = differentiate(make_neuron(function, "torch"), x)
    for kernel in (make_neuron(function, "triton"), pointwise(function, autograd=True)):
        for actual, expected_tensor in zip(differentiate(kernel, x), expected, strict=True):
            torch.testing.assert_close(actual, expected_tensor, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        torch.angle,
        lambda x: torch.polygamma(2, x),
        torch.special.bessel_y0,
        torch.special.bessel_y1,
        torch.special.modified_bessel_i0,
        torch.special.modified_bessel_k1,
        torch.special.scaled_modified_bessel_k0,
        lambda x: torch.special.hermite_polynomial_h(x, 3),
        lambda x: torch.special.chebyshev_polynomial_t(x, 40),
    ],
)
def test_steps_may_contain_any_op_with_a_rule(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-0.9, 3.0, 24).reshape(2, 12)
    torch.testing.assert_close(make_neuron(function, "triton")(x), function(x), equal_nan=True)


@pytest.mark.parametrize("function", [torch.special.airy_ai, torch.ops.prims.cbrt])
def test_trace_refuses_ops_without_a_rule(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedCoreError, match=r"has no rule\. Write it in other ops, or add one with") as caught:
        make_neuron(function, "triton")(torch.ones(1, 3))
    assert caught.value.op


def test_torch_references_can_be_called() -> None:
    weight = torch.tensor([0.1])

    def function(x: Tensor) -> Tensor:
        result: Tensor = torch._refs.nn.functional.prelu(x, weight)
        return result

    x = torch.linspace(-2, 2, 12).reshape(2, 6, 1)
    torch.testing.assert_close(make_neuron(function, "triton")(x), functional.prelu(x, weight))


def test_torch_errors_in_a_trace_name_the_line() -> None:
    other = torch.ones(7)
    with pytest.raises(TorchError, match=r"(.|\n)*at .*test_scan_ops\.py:\d+.*x \+ other"):
        make_neuron(lambda x: x + other, "triton")(torch.ones(1, 3))
    with pytest.raises(TorchError, match=r"\[7\](.|\n)*\[5\](.|\n)*at .*test_scan_ops\.py:\d+.*torch\.ones\(7\)"):
        pointwise(lambda x: x + torch.ones(7))(torch.ones(5))


def test_user_errors_are_not_changed() -> None:
    def function(x: Tensor) -> Tensor:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match=r"^not today$"):
        make_neuron(function, "triton")(torch.ones(1, 3))


def test_argument_without_a_gradient_is_refused() -> None:
    def loss(x: Tensor, target: Tensor) -> tuple[Tensor]:
        return (functional.soft_margin_loss(x, target, reduction="none"),)

    x, target = torch.tensor([[0.5, -1.0]]), torch.tensor([[1.0, -1.0]])
    kernel = FlexSN(loss, 2, 0, 1, backend="triton")
    x.requires_grad_()
    result = kernel(x, target)
    torch.testing.assert_close(result, loss(x, target)[0])
    result.sum().backward()
    assert x.grad is not None
    with pytest.raises(TorchError, match="'target'"):
        kernel(x, target.clone().requires_grad_()).sum().backward()


@pytest.fixture
def triangle() -> Iterator[Callable[..., Tensor]]:
    """Registers an op of another project with its implementation, its gradient, its facts, and a rule for Triton."""
    from flexsn_codegen import TRITON
    from flexsn_graph.ir._ops import _FACTS

    with torch.library._scoped_library("scan_ops_test", "DEF") as library:
        library.define("triangle(Tensor x, float width) -> Tensor")
        library.define("slope(Tensor grad, Tensor x, float width) -> Tensor")
        library.impl("triangle", lambda x, width: (1.0 - x.abs() / width).clamp(min=0.0), "CompositeExplicitAutograd")
        library.impl(
            "slope",
            lambda grad, x, width: torch.where(x.abs() < width, -x.sign() * grad / width, 0.0),
            "CompositeExplicitAutograd",
        )
        ops = torch.ops.scan_ops_test

        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return ops.slope(grad, x, ctx.width), None  # type: ignore[attr-defined]

        def setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
            ctx.save_for_backward(inputs[0])
            ctx.width = inputs[1]  # type: ignore[attr-defined]

        torch.library.register_autograd("scan_ops_test::triangle", backward, setup_context=setup, lib=library)

        @register_op(ops.triangle.default, facts=OpFacts(continuous=frozenset({0})))
        def write_triangle(call: OpCall) -> str:
            x, width = call.operands
            return f"dev.maximum({call.number(1.0)} - dev.div(tl.abs({x}), {width}), {call.number(0.0)})"

        @register_op(ops.slope.default, facts=OpFacts(linear=(frozenset({0}),), continuous=frozenset({0})))
        def write_slope(call: OpCall) -> str:
            grad, x, width = call.operands
            sign = f"tl.where({x} > {call.number(0.0)}, {call.number(-1.0)}, {call.number(1.0)})"
            inside = f"(tl.abs({x}) < {width}) & ({x} != {call.number(0.0)})"
            return f"tl.where({inside}, dev.div({grad} * {sign}, {width}), {call.number(0.0)})"

        yield ops.triangle
        for op in (ops.triangle.default, ops.slope.default):
            TRITON.rules.pop(op)
            _FACTS.pop(op)


def test_foreign_ops_work_with_facts_and_a_rule(triangle: Callable[..., Tensor]) -> None:
    weight = torch.tensor(0.7, requires_grad=True)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * v + x * weight
        return triangle(h - 1.0, 1.5), h

    assert torch.ops.scan_ops_test.triangle.default in supported_ops()
    assert facts_of(torch.ops.scan_ops_test.slope.default) is not None
    x = torch.linspace(-2, 4, 60).reshape(5, 12)
    results = {}
    for backend in ("triton", "torch"):
        leaf = x.clone().requires_grad_()
        result = FlexSN(core, 1, 1, 1, backend=backend)(leaf)
        # The gradient of the scalar weight is a sum over all elements. Each term of the sum depends on `slope`.
        results[backend] = (result, *torch.autograd.grad(result.square().sum(), (leaf, weight)))
    for actual, expected in zip(results["triton"], results["torch"], strict=True):
        torch.testing.assert_close(actual, expected)
    kernel = pointwise(lambda x: triangle(x, 2.0) * 3.0, autograd=True)
    for actual, expected in zip(
        differentiate(kernel, x), differentiate(lambda x: triangle(x, 2.0) * 3.0, x), strict=True
    ):
        torch.testing.assert_close(actual, expected)
