"""Captured tensors become lifted arguments. Each is the user's object with its current values, and occurs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from graph_cores import PLIF
from graph_eval import assert_forward_equal, check_step, run_forward
from torch import Tensor, nn

from flexsn_graph import CaptureError, LiftedLayout, trace_step


def draw_arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    return x, v


def draw_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape))


def test_captured_tensors_are_listed_once_in_order_of_first_use() -> None:
    a, b, c = draw_parameter(4), torch.ones(4, dtype=torch.float64), draw_parameter(3, 1)
    trace = check_step(lambda x, v: (x * b + a * c * b, v * a), draw_arguments(), (1, 1, 1))
    assert [id(t) for t in trace.lifted] == [id(b), id(a), id(c)]
    assert [str(v) for v in trace.lifted_values] == ["[4] float64", "[4] float64", "[3, 1] float64"]


def test_layouts_describe_the_element_that_each_position_reads() -> None:
    scalar, row, column, matrix = draw_parameter(), draw_parameter(4), draw_parameter(3), draw_parameter(4, 3)
    core = lambda x, v: (x * scalar + row, v * column[:, None] * matrix.t())  # noqa: E731
    trace = check_step(core, draw_arguments(), (1, 1, 1))
    assert trace.forward.layouts == {
        0: LiftedLayout((0, 0), 0),
        1: LiftedLayout((0, 1), 0),
        2: LiftedLayout((1, 0), 0),
        3: LiftedLayout((1, 3), 0),
    }


def test_tensor_that_only_the_backward_reads_has_no_forward_layout() -> None:
    w = torch.ones(4, dtype=torch.float64)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * w

    trace = check_step(lambda x, v: (Function.apply(x), v), draw_arguments(), (1, 1, 1))
    assert trace.lifted == (w,)
    assert trace.forward.layouts == {}
    assert trace.vjp([True, True], [True] * 3).layouts == {0: LiftedLayout((0, 1), 0)}


DATA_AND_OTHERS: dict[str, Callable[[nn.Parameter], tuple[Tensor, Tensor]]] = {
    "data_first": lambda w: (w.data, w),
    "data_second": lambda w: (w, w.data),
    "detached_before": lambda w: (w.detach(), w),
}


@pytest.mark.parametrize("name", DATA_AND_OTHERS)
def test_tensors_with_equal_memory_are_lifted_once_and_have_a_gradient(name: str) -> None:
    w = draw_parameter(4)
    tensors = DATA_AND_OTHERS[name](w)

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first, second = tensors if name == "detached_before" else DATA_AND_OTHERS[name](w)
        return x * first, v * second

    trace = check_step(core, draw_arguments(), (1, 1, 1))
    assert len(trace.lifted) == 1
    assert trace.lifted[0] is w


def test_data_of_a_parameter_is_constant_for_autograd() -> None:
    w = draw_parameter(4)
    trace = check_step(lambda x, v: (x * w.data, v), draw_arguments(), (1, 1, 1))
    assert trace.lifted[0].data_ptr() == w.data_ptr()
    assert trace.vjp([True, True], [True] * 3).gradients == (0, 1, None)


def test_each_of_two_parameters_with_equal_memory_has_a_gradient() -> None:
    w = draw_parameter(4)
    u = nn.Parameter(w.data)
    trace = check_step(lambda x, v: (x * w, v * u), draw_arguments(), (1, 1, 1))
    assert [id(t) for t in trace.lifted] == [id(w), id(u)]


def test_two_views_of_one_tensor_are_lifted_separately() -> None:
    rows = draw_parameter(2, 4)
    first, second = rows[0], rows[1]
    trace = check_step(lambda x, v: (x * first, v * second), draw_arguments(), (1, 1, 1))
    assert [id(t) for t in trace.lifted] == [id(first), id(second)]


def test_tensor_with_an_autograd_history_is_lifted() -> None:
    w = draw_parameter(4).exp()
    trace = check_step(lambda x, v: (x * w, v), draw_arguments(), (1, 1, 1))
    assert trace.lifted[0] is w


def test_tensor_without_requires_grad_has_no_gradient() -> None:
    for w in (draw_parameter(4).requires_grad_(False), torch.arange(4), torch.tensor([True, False, True, True])):
        trace = check_step(lambda x, v, w=w: (torch.where(w > 0, x, v) * w, v), draw_arguments(), (1, 1, 1))
        assert trace.vjp([True, True], [True] * 3).gradients == (0, 1, None)


def test_zero_dimensional_integer_does_not_promote() -> None:
    n = torch.tensor(3)
    x = torch.randn(5).half()
    trace = trace_step(lambda x: x * n, 1, 0, 1, (x,))
    assert str(trace.outputs[0]) == "[5] float16"
    assert_forward_equal(trace, lambda x: x * n, (x,))


def test_update_in_place_is_used() -> None:
    core = PLIF(torch.zeros(4, dtype=torch.float64))
    trace = trace_step(core, 1, 1, 1, draw_arguments())
    old_results = run_forward(trace, draw_arguments())
    with torch.no_grad():
        core.w.add_(3.0)
    assert_forward_equal(trace, core, draw_arguments(), rtol=1e-15)
    assert not torch.equal(old_results[1], run_forward(trace, draw_arguments())[1])


def test_new_dtype_or_shape_is_reported() -> None:
    for change in (lambda m: m.half(), lambda m: setattr(m.w, "data", torch.zeros(3, 4))):
        core = PLIF(torch.zeros(4, dtype=torch.float64))
        trace = trace_step(core, 1, 1, 1, draw_arguments())
        change(core)
        with pytest.raises(CaptureError, match=r"was \[4\] torch.float64 .* trace the core again"):
            trace.vjp([True, True], [True] * 3)


def test_replaced_parameter_is_reported() -> None:
    core = PLIF(torch.zeros(4, dtype=torch.float64))
    trace = trace_step(core, 1, 1, 1, draw_arguments())
    core.w = draw_parameter(4)
    with pytest.raises(CaptureError, match="did not use when it was traced before"):
        trace.vjp([True, True], [True] * 3)


def test_trace_is_only_valid_for_equal_requires_grad() -> None:
    core = PLIF(torch.zeros(4, dtype=torch.float64))
    trace = trace_step(core, 1, 1, 1, draw_arguments())
    core.w.requires_grad_(False)
    assert trace.vjp([True, True], [True] * 3).gradients[2] is not None
    assert trace.vjp([True, True], [True, True, False]).gradients[2] is None
    assert not core.w.requires_grad


def test_gradient_hooks_run_only_for_the_real_gradient() -> None:
    w = draw_parameter(4)
    calls: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor:
        calls.append(grad)
        return grad * 2.0

    w.register_hook(hook)
    trace = trace_step(lambda x, v: (x * w, v), 1, 1, 1, draw_arguments())
    graph = trace.vjp([True, True], [True] * 3).graph
    assert calls == []
    assert not [n for n in graph.nodes if 2.0 in n.args], "the hook is in the graph"
    (w * 1.0).sum().backward()
    assert len(calls) == 1, "the hook was lost"


def test_part_of_a_tensor_without_requires_grad_is_lifted() -> None:
    rows = torch.randn(2, 4, dtype=torch.float64)
    for part in (lambda: rows[1], lambda: rows.unbind(0)[1], lambda: rows[1:2]):
        trace = check_step(lambda x, v, part=part: (x * part(), v), draw_arguments(), (1, 1, 1))
        assert trace.forward.layouts == {0: LiftedLayout((0, 1), 4)}


PLACE = torch.zeros(4, 4)
SPARSE = torch.eye(4).to_sparse()
ARRAY = numpy.zeros((2, 2), dtype=numpy.float32)

REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "sparse": (lambda x, v: (x * SPARSE, v), "layout torch.sparse_coo"),
    "constant in the core": (lambda x, v: (x * torch.tensor([1.0, 2, 3, 4]), v), "makes a constant"),
    "array in the core": (lambda x, v: (x * torch.from_numpy(ARRAY)[1, 0], v), "Create constants outside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_captured_objects_without_kernels_are_refused(name: str) -> None:
    core, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as caught:
        trace_step(lambda x, v: (core(x, v)[0], v), 1, 1, 1, (PLACE, PLACE))
    assert "test_graph_captures.py" in str(caught.value)


def test_retained_gradients_are_refused_and_not_written() -> None:
    w = draw_parameter(4).exp()
    w.retain_grad()
    with pytest.raises(CaptureError, match="retain_grad"):
        trace_step(lambda x, v: (x * w, v), 1, 1, 1, draw_arguments())
    assert w.grad is None
