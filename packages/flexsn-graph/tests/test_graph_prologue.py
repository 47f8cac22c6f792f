"""Values that a core computes only from captured tensors. Operations that a step cannot perform run before the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_eval import assert_forward_equal, assert_vjp_equal, check_step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexsn_graph import (
    CaptureError,
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    StepTrace,
    generate_inference_graph,
    trace_step,
)


def draw_parameter(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))


W, U, SQUARE = draw_parameter(2, 4), draw_parameter(4), draw_parameter(4, 4)
INDEX = torch.tensor([2])
TABLE = torch.randn(3, 4, dtype=torch.float64)


def draw_arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator)
    return x, v


def make_trace(core: Callable[[Tensor, Tensor], Any]) -> StepTrace:
    return trace_step(core, 1, 1, 1, draw_arguments())


Core = Callable[[Tensor, Tensor], Any]
# Maps a name to a core, the count of its captured tensors, and the count of its lifted tensors.
RIGHT: dict[str, tuple[Core, int, int]] = {
    "row": (lambda x, v: (x * W[0], v), 1, 1),
    "two_rows": (lambda x, v: (x * W[0], v * W[1]), 1, 2),
    "row_and_whole": (lambda x, v: (x * U[0] + U, v), 1, 2),
    "row_twice": (lambda x, v: (x * W[0] + v, v * W[0]), 1, 1),
    "row_of_rows": (lambda x, v: (x * W[1][2], v), 1, 1),
    "unbind": (lambda x, v: (x * W.unbind(0)[1], v * W.unbind(0)[0]), 1, 2),
    "chunk": (lambda x, v: (x * W.chunk(2, 0)[1] * W.chunk(2, 0)[1], v), 1, 1),
    "narrow": (lambda x, v: (x * W.narrow(0, 1, 1), v), 1, 1),
    "every_other": (lambda x, v: (x * W.flatten()[::2], v), 1, 1),
    "diagonal": (lambda x, v: (x * SQUARE.diagonal(), v), 1, 1),
    "indices": (lambda x, v: (x * U[[3, 1, 2, 0]], v), 1, 1),
    "gather": (lambda x, v: (x * TABLE[INDEX], v), 2, 1),
    "function_of_a_row": (lambda x, v: (x * W[0].sigmoid(), v), 1, 1),
    "row_of_a_function": (lambda x, v: (x * W.exp().softmax(0)[1], v), 1, 1),
    "sum": (lambda x, v: (x * U.sum(), v), 1, 1),
    "mean_and_max": (lambda x, v: (x * U.mean() + v * U.max(0).values, v), 1, 2),
    "softmax": (lambda x, v: (x * torch.softmax(U, 0), v), 1, 1),
    "flip": (lambda x, v: (x * U.flip(0), v), 1, 1),
    "cumsum": (lambda x, v: (x * U.cumsum(0), v), 1, 1),
    "cat": (lambda x, v: (x * torch.cat([U[:2], W[0, 2:]]), v), 2, 1),
    "stack": (lambda x, v: (x * torch.stack([U, U, W[0], W[1]]), v), 2, 1),
    "matrix_product": (lambda x, v: (x * (W @ U)[0], v * (W @ U)[1]), 2, 2),
    "linear": (lambda x, v: (x * nn.functional.linear(U, SQUARE), v), 2, 1),
    "normalised": (lambda x, v: (x * nn.functional.normalize(U, dim=0), v), 1, 1),
    "two_layouts": (lambda x, v: (x * SQUARE + SQUARE.t(), v), 1, 2),
    "rows_and_columns": (lambda x, v: (x * U[:, None] + v * U, v), 1, 2),
    "outer_product": (lambda x, v: (x * torch.outer(U, U), v), 1, 1),
    "counted": (lambda x, v: (x * torch.arange(4) + U * torch.arange(4), v), 1, 2),
    "constant_parts": (lambda x, v: (x * TABLE[0] * TABLE[1], v), 1, 2),
    "returned": (lambda x, v: (W[0].expand(4, 4), v), 1, 1),
}


@pytest.mark.long(
    all_but=[
        "two_rows",
        "row_and_whole",
        "unbind",
        "every_other",
        "diagonal",
        "gather",
        "row_of_a_function",
        "mean_and_max",
        "cumsum",
        "cat",
        "matrix_product",
        "normalised",
        "two_layouts",
        "rows_and_columns",
        "counted",
        "constant_parts",
        "returned",
    ]
)
@pytest.mark.parametrize("name", RIGHT)
def test_values_and_gradients_equal_eager_mode(name: str) -> None:
    core, captured, lifted = RIGHT[name]
    trace = check_step(core, draw_arguments(), (1, 1, 1), rtol=1e-15)
    assert len(trace.captured) == captured
    assert len(trace.lifted_values) == lifted
    values = trace.lift(trace.captured)
    assert [(tuple(t.shape), t.dtype) for t in values] == [(v.shape, v.dtype) for v in trace.lifted_values]


def test_elementwise_operations_remain_in_the_step() -> None:
    """Checks simple operations, which cost nothing in the step, but would need a kernel launch outside of the step."""
    core: Core = lambda x, v: (x * U.sigmoid() + U.view(4, 1).clamp(0, 1).expand(4, 4).t(), v)  # noqa: E731
    trace = make_trace(core)
    assert trace.captured == (U,)
    assert trace.lifted == (U,)
    other = draw_parameter(4)
    assert trace.lift((other,))[0] is other


def test_lift_follows_the_captured_tensors() -> None:
    w = draw_parameter(2, 4)
    core: Core = lambda x, v: (x * w.softmax(0)[1], v)  # noqa: E731
    trace = make_trace(core)
    with torch.no_grad():
        w.mul_(3.0)
    assert_forward_equal(trace, core, draw_arguments(), rtol=1e-15)
    other = draw_parameter(2, 4) * 2.0
    assert torch.equal(trace.lift([other])[0], other.softmax(0)[1])


def test_lift_uses_the_autocast_settings_of_the_trace() -> None:
    trace = trace_step(lambda x: x * (SQUARE.float() @ SQUARE.float())[0], 1, 0, 1, (torch.zeros(4, 4),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [t.dtype for t in trace.lift(trace.captured)] == [torch.float32]


@pytest.mark.parametrize("around", [False, True])
def test_prologue_runs_under_the_autocast_of_the_core(around: bool) -> None:
    table = SQUARE.detach().float().requires_grad_()

    def core(x: Tensor, v: Tensor) -> Any:
        plain = (table @ table)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x * (table @ table)[0] + plain, v

    x = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        trace = trace_step(core, 1, 1, 1, (x, x))
        product = table @ table  # autocast may not use a conversion that it cached during the trace
        assert product.dtype == (torch.bfloat16 if around else torch.float32)
        wide, narrow = sorted(trace.lift(trace.captured), key=lambda t: -t.element_size())
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide, (table @ table)[0])
    assert torch.equal(narrow, (table.bfloat16() @ table.bfloat16())[0])
    (gradient,) = torch.autograd.grad(narrow.sum() + wide.sum(), table)
    assert gradient.dtype == torch.float32


def test_only_needed_values_are_computed() -> None:
    calls: list[str] = []

    def core(x: Tensor, v: Tensor) -> Any:
        U.flip(0)  # the result is not used
        return x * U.sum(), v

    trace = make_trace(core)

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record():  # type: ignore[no-untyped-call]
        trace.lift(trace.captured)
    assert "aten.sum.default" in calls
    assert "aten.flip.default" not in calls


def test_detached_values_have_no_gradient() -> None:
    def core(x: Tensor, v: Tensor) -> Any:
        with torch.no_grad():
            detached_sum = U.sum()
        return x * detached_sum + v * W.data.sum(0), v * W.sum(0)

    trace = check_step(core, draw_arguments(), (1, 1, 1), rtol=1e-15)
    assert trace.vjp([True, True], [True] * (2 + len(trace.lifted_values))).gradients.count(None) >= 1


class Surrogate(torch.autograd.Function):
    """A function that reads a sum of its parameter in the forward, and has a custom gradient for the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x > w.sum()).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w.mean(), (grads[0] * x).sum(0)


def test_values_inside_an_autograd_function_are_hoisted() -> None:
    trace = check_step(lambda x, v: (Surrogate.apply(x, U), v), draw_arguments(), (1, 1, 1))
    assert trace.captured == (U,)


def test_trace_is_only_valid_for_equal_requires_grad() -> None:
    w = draw_parameter(2, 4)
    core: Core = lambda x, v: (x * w[0], v)  # noqa: E731
    trace = make_trace(core)
    w.requires_grad_(False)
    assert trace.vjp([True, True], [True] * 3).gradients == (0, 1, 2)
    assert trace.vjp([True, True], [True, True, False]).gradients == (0, 1, None)
    assert not w.requires_grad
    w.requires_grad_(True)
    x, v = draw_arguments()
    assert_vjp_equal(trace, core, (x, v), (x, v))


def test_changed_captured_tensor_is_reported() -> None:
    holder = {"w": draw_parameter(2, 4)}
    trace = make_trace(lambda x, v: (x * holder["w"][0], v))
    holder["w"] = draw_parameter(2, 4)
    with pytest.raises(CaptureError, match="did not use when it was traced before"):
        trace.vjp([True, True], [True] * 3)


def test_caller_without_a_prologue_receives_an_error() -> None:
    with pytest.raises(CaptureError, match=r"(?s)calls sum on captured tensors alone.*test_graph_prologue"):
        _ = make_trace(lambda x, v: (x * U.sum(), v)).lifted


REFUSED: dict[str, tuple[type[Exception], str, Core]] = {
    "random": (RandomOpError, "aten.rand_like", lambda x, v: x * torch.rand_like(U)),
    "dropout": (RandomOpError, "aten.", lambda x, v: x * nn.functional.dropout(U)),
    "value": (DataDependentError, "_local_scalar_dense", lambda x, v: x * U[0].item()),
    "if": (DataDependentError, "_local_scalar_dense", lambda x, v: x if U.sum() > 0 else v),
    "write": (MutationError, "aten.zero_", lambda x, v: x * U[:2].data.zero_().sum()),
    "write_to_a_row": (MutationError, "aten.fill_", lambda x, v: x * W.detach()[0].fill_(1.0)),
    "write_to_a_part": (MutationError, "aten.mul_", lambda x, v: W.softmax(0)[0].mul_(x[0])),
    "mask": (NonPointwiseError, "aten.nonzero|aten.index", lambda x, v: x * U[U > 0].sum()),
    "of_the_input": (NonPointwiseError, "aten.sum", lambda x, v: x * (U + x).sum()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_cannot_be_hoisted_are_refused(name: str) -> None:
    error, op, function = REFUSED[name]
    before = [t.detach().clone() for t in (U, W)]
    with pytest.raises(error, match=op) as caught:
        make_trace(lambda x, v: (function(x, v), v))
    assert "test_graph_prologue.py" in str(caught.value)
    assert all(torch.equal(t, old) for t, old in zip((U, W), before, strict=True))


def test_elementwise_graph_has_no_prologue() -> None:
    with pytest.raises(NonPointwiseError, match=r"aten.sum"):
        generate_inference_graph(lambda x: x * U.sum(), (torch.zeros(4),))
