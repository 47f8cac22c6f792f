"""The VJP graph computes autograd's gradients for every choice of present and required gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graph_cores import CASES, PLIF, Case, lif_core
from graph_eval import assert_vjp_equal, check_step, eager_vjp, run_forward, run_vjp
from torch import Tensor

from flexsn_graph import RequiresGradError, UnsupportedCoreError, trace_step


@pytest.mark.long(all_but=["lif_custom_op", "izhikevich", "two_by_two", "lif_detach_trick"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cores_have_autograds_gradients(case: Case) -> None:
    check_step(case.core, case.arguments(), case.counts)


READS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "scalar": ((), lambda w: w),
    "one": ((1,), lambda w: w),
    "last_axis": ((4,), lambda w: w),
    "view": ((3,), lambda w: w.view(-1, 1, 1)),
    "none_index": ((3,), lambda w: w[None, :, None, None]),
    "as_shaped": ((3, 1, 1), lambda w: w),
    "expand": ((3,), lambda w: w.view(1, 3, 1, 1).expand(2, 3, 5, 4)),
    "repeat": ((3,), lambda w: w.view(1, 3, 1, 1).repeat(2, 1, 5, 4)),
    "two_axes": ((3, 5), lambda w: w.unsqueeze(-1)),
    "transposed": ((5, 3), lambda w: w.t()[:, :, None]),
    "flat": ((60,), lambda w: w.view(3, 5, 4)),
    "after_a_function": ((4, 5), lambda w: w.tanh().permute(1, 0)),
}


@pytest.mark.long(all_but=["one", "view", "none_index", "expand", "transposed", "flat", "after_a_function"])
@pytest.mark.parametrize("read", READS)
def test_captured_parameter_has_autograds_gradient(read: str) -> None:
    shape, function = READS[read]
    torch.manual_seed(0)
    core = PLIF(torch.randn(shape, dtype=torch.float64), function)
    x, v = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    trace = check_step(core, (x, v), (1, 1, 1), rtol=1e-14)
    assert len(trace.lifted) == 1
    assert trace.lifted[0] is core.w


def test_parameter_that_is_not_contiguous_has_autograds_gradient() -> None:
    torch.manual_seed(0)
    core = PLIF(torch.randn(4, 2, 3, dtype=torch.float64).permute(2, 0, 1)[:, :, 1], lambda w: w[:, :, None])
    assert not core.w.is_contiguous()
    x, v = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    check_step(core, (x, v), (1, 1, 1), rtol=1e-14)


@pytest.mark.long(all_but=["shape0", "shape3", "shape5"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (1, 4), (1, 1, 3, 4)])
def test_gradient_of_a_broadcast_input_has_the_steps_shape(shape: tuple[int, ...]) -> None:
    """Checks that the gradient has the step's shape, from which the sum to the input's shape is computed."""
    torch.manual_seed(0)
    small = torch.randn(shape, dtype=torch.float64)
    x, v = torch.randn(2, 2, 1, 3, 4, dtype=torch.float64)

    def core(b: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * torch.sigmoid(b) + x * (b * b)
        return h.tanh(), h

    check_step(core, (small, x, v), (2, 1, 1), rtol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (1,), ()])
def test_steps_with_sizes_of_one_have_autograds_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    core = PLIF(torch.randn(shape, dtype=torch.float64), lambda w: w * 1.5)
    x, v = torch.randn(2, *shape, dtype=torch.float64)
    check_step(core, (x, v), (1, 1, 1), rtol=1e-14)


@pytest.mark.long(
    all_but=["required7-cotangents0", "required3-cotangents2", "required5-cotangents1", "required0-cotangents3"]
)
@pytest.mark.parametrize("cotangents", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("required", list(itertools.product([True, False], repeat=3)))
def test_gradients_exist_exactly_as_required(cotangents: tuple[bool, ...], required: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    core = PLIF(torch.randn(3, dtype=torch.float64))
    x, v, *grads = torch.randn(4, 2, 3, dtype=torch.float64)
    trace = trace_step(core, 1, 1, 1, (x, v))
    weights = [g if is_present else None for g, is_present in zip(grads, cotangents, strict=True)]
    reference = eager_vjp(core, (x, v), trace.lifted, weights)
    actual = run_vjp(trace, (x, v), weights, required)
    for is_required, ours, theirs in zip(required, actual, reference, strict=True):
        assert (ours is None) == (not is_required or not any(cotangents))
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_all_masks_of_cotangents_have_autograds_gradients() -> None:
    """Also tests the mask without any cotangent, with which nothing is computed."""

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, v = lif_core()(x, v)
        return s, v * x, v

    x, v, *grads = torch.randn(5, 4, dtype=torch.float64)
    trace = trace_step(core, 1, 1, 2, (x, v))
    for mask in itertools.product([True, False], repeat=3):
        cotangents = [g if is_present else None for g, is_present in zip(grads, mask, strict=True)]
        assert_vjp_equal(trace, core, (x, v), cotangents)
        placeholders = [n.name for n in trace.vjp(mask, [True, True]).graph.nodes if n.op == "placeholder"]
        names = ["grad_output_0", "grad_output_1", "grad_state_0"]
        assert placeholders[2:] == [name for name, is_present in zip(names, mask, strict=True) if is_present]
    assert trace.vjp([False] * 3, [True, True]).gradients == (None, None)


def test_gradients_that_are_not_required_are_not_computed() -> None:
    trace = trace_step(PLIF(torch.zeros(3)), 1, 1, 1, (torch.zeros(2, 3), torch.zeros(2, 3)))
    complete = len(trace.vjp([True, True], [True, True, True]).graph.nodes)
    without_parameter = len(trace.vjp([True, True], [True, True, False]).graph.nodes)
    without_output = len(trace.vjp([False, True], [True, True, True]).graph.nodes)
    nothing = [n for n in trace.vjp([True, True], [False] * 3).graph.nodes if n.op == "call_function"]
    assert without_parameter < complete
    assert without_output < complete
    assert nothing == []


def test_gradients_that_are_always_zero_are_absent() -> None:
    """Tests a missing path, a hard threshold, and `floor`, whose gradient in autograd is zeros."""

    def core(x: Tensor, y: Tensor, z: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (y > 0.0).to(v) + z.floor(), v + x

    x, y, z, v, g, h = torch.randn(6, 4, dtype=torch.float64)
    n = torch.arange(4)
    trace = trace_step(core, 4, 1, 1, (x, y, z, n, v))
    vjp = trace.vjp([True, True], [True] * 5)
    assert vjp.gradients == (0, None, None, None, 1)
    assert_vjp_equal(trace, core, (x, y, z, n, v), (g, h))


def test_results_without_a_gradient_are_not_differentiable() -> None:
    trace = trace_step(lambda x, v: (x > v, v * x), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    assert trace.differentiable == (False, True)
    frozen = torch.zeros(3)
    with_parameter = torch.nn.Parameter(torch.zeros(3))
    trace = trace_step(lambda n: (n * with_parameter, n * frozen), 1, 0, 2, (torch.arange(3),))
    assert trace.differentiable == (True, False)
    assert trace.vjp([True, True], [True] * 3).gradients == (None, 0, None)


def test_aliased_results_have_autograds_gradients() -> None:
    w = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    cores: list[Callable[..., tuple[Tensor, ...]]] = [
        lambda x, v: (x + v,) * 2,
        lambda x, v: (x, v),
        lambda x, v: (v, x),
        lambda x, v: (v, v),
        lambda x, v: (w, w + 0.0 * v),
        lambda x, v: (w.expand_as(x), v.view_as(v)),
        lambda x, v: (torch.full_like(x, 2.5), v.detach()),
    ]
    x, v = torch.randn(2, 4, dtype=torch.float64)
    for core in cores:
        check_step(core, (x, v), (1, 1, 1))


def test_half_precision_gradients_round_as_autograd_does() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x, v, g, h = torch.randn(4, 200).to(dtype)
        trace = trace_step(lif_core(), 1, 1, 1, (x, v))
        assert_vjp_equal(trace, lif_core(), (x, v), (g, h), tolerance=0.0)


def test_masks_of_wrong_lengths_are_refused() -> None:
    trace = trace_step(lif_core(), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    with pytest.raises(RequiresGradError, match=r"masks for 1 results and 3 arguments.*2 results and 2 arg"):
        trace.vjp([True], [True] * 3)


def test_core_without_a_derivative_serves_inference() -> None:
    def core(x: Tensor) -> Tensor:
        return torch.heaviside(x, torch.tensor(1.0))

    trace = trace_step(core, 1, 0, 1, (torch.zeros(3),))
    with pytest.raises(UnsupportedCoreError, match="derivative for aten::heaviside is not implemented"):
        trace.vjp([True], [True])


LOGITS: dict[str, Callable[..., Tensor]] = {
    "logit": lambda x, t: torch.logit(x),
    "logit_eps": lambda x, t: torch.logit(x, 0.25),
    "binary_cross_entropy_with_logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
    "with_pos_weight": lambda x, t: F.binary_cross_entropy_with_logits(
        x, t, pos_weight=torch.full((), 3.0, dtype=x.dtype), reduction="none"
    ),
}


@pytest.mark.long(
    all_but=[
        "logit-dtype1",
        "logit_eps-dtype0",
        "binary_cross_entropy_with_logits-dtype2",
        "with_pos_weight-dtype3",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOGITS)
def test_logit_and_cross_entropy_equal_eager_mode_at_special_values(name: str, dtype: torch.dtype) -> None:
    """Tests infinity. Torch's decomposition of the cross entropy returns NaN there, and eager mode returns infinity."""
    special = [0.0, 1.0, 0.5, 0.25, 2.0, -1.0, 100.0, -100.0, float("inf"), float("-inf")]
    if name != "logit_eps":  # in eager mode, NaN depends on the element's position in memory
        special.append(float("nan"))
    x, t = (m.reshape(-1) for m in torch.meshgrid(2 * [torch.tensor(special, dtype=dtype)], indexing="ij"))
    core, ones = LOGITS[name], torch.ones_like(x)
    trace = trace_step(core, 2, 0, 1, (x, t))
    # Vectorised half-precision kernels on the CPU round after each op, and other kernels round once.
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    actual, expected = run_forward(trace, (x, t))[0], core(x, t)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    for ours, theirs in zip(run_vjp(trace, (x, t), [ones]), eager_vjp(core, (x, t), (), [ones]), strict=True):
        if theirs is not None:
            assert ours is not None
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
