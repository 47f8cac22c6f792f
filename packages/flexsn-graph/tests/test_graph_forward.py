"""The normalised forward graph has the same bits as the core."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_cores import CASES, Case
from graph_eval import assert_forward_equal, assert_same, evaluate
from torch import Tensor

from flexsn_graph import trace_step


@pytest.mark.long(
    all_but=[
        "lif_hard_detached-dtype0",
        "lif_soft_detached-dtype1",
        "if-dtype3",
        "lif_soft-dtype2",
        "lif_hard-dtype0",
        "lif_detach_trick-dtype1",
        "alif-dtype0",
        "two_by_two-dtype2",
        "izhikevich-dtype0",
        "lif_custom_op-dtype1",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cores_are_exact(case: Case, dtype: torch.dtype) -> None:
    arguments = case.arguments((3, 67), dtype)
    trace = trace_step(case.core, *case.counts, arguments)
    assert_forward_equal(trace, case.core, arguments)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 3), (2, 1, 3), (2, 3, 1), (0, 3)])
def test_forward_is_exact_for_any_step_shape(shape: tuple[int, ...]) -> None:
    case = CASES[1]
    arguments = case.arguments(shape)
    trace = trace_step(case.core, *case.counts, arguments)
    assert trace.step_shape == shape
    assert_forward_equal(trace, case.core, arguments)


def test_special_values_are_exact() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3e38])
    x, v = torch.meshgrid(special, special, indexing="ij")
    for case in CASES[:7]:
        trace = trace_step(case.core, *case.counts, (x, v))
        assert_forward_equal(trace, case.core, (x, v))


def test_integer_and_bool_states_keep_their_dtypes() -> None:
    """Tests a core whose states are a refractory counter and a flag."""

    def core(x: Tensor, wait: Tensor, fired: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = (x > 0.5) & (wait == 0) & ~fired
        wait = torch.where(s, 3, (wait - 1).clamp(min=0)).to(wait.dtype)
        return s, wait, s | (wait > 1)

    x = torch.randn(50)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        wait = torch.randint(0, 4, (50,), dtype=dtype)
        trace = trace_step(core, 1, 2, 1, (x, wait, x > 0))
        assert [v.dtype for v in (*trace.states, *trace.outputs)] == [dtype, torch.bool, torch.bool]
        assert_forward_equal(trace, core, (x, wait, x > 0))


def test_mixed_dtypes_are_promoted_as_in_eager() -> None:
    def core(x: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return x * n + 1, n / 3, (n > 1) * v + 2**10, v + (n // 2) % 3

    x = torch.randn(40).half()
    n = torch.randint(-5, 5, (40,), dtype=torch.int32)
    v = torch.randn(40)
    trace = trace_step(core, 2, 1, 3, (x, n, v))
    assert_forward_equal(trace, core, (x, n, v))


def test_constants_keep_their_dtype() -> None:
    """Checks that equal literals in two dtypes are two values, and that a folded constant rounds in its own dtype."""

    def core(x: Tensor) -> tuple[Tensor, ...]:
        small = torch.where(x > 0, torch.tensor(100, dtype=torch.int8), torch.tensor(0, dtype=torch.int8))
        large = torch.where(x > 0, torch.tensor(100), torch.tensor(0))
        third = torch.tensor(1.0, dtype=torch.float16) / 3
        chosen = torch.where(torch.tensor(True), torch.tensor(1.5), torch.tensor(2.5))
        return small + small, large + large, third * x, chosen + x

    x = torch.randn(20)
    trace = trace_step(core, 1, 0, 4, (x,))
    assert_forward_equal(trace, core, (x,))
    targets = [n.target for n in trace.forward.graph.nodes]
    assert torch.ops.prims.div.default not in targets, "1/3 was not folded"


def test_constants_outside_of_their_dtype_wrap_or_become_infinite() -> None:
    """Checks that integers wrap as in eager mode, and that numbers too large for a float are infinite."""
    x8 = torch.tensor([1, -5, 100], dtype=torch.int8)
    u8 = torch.tensor([1, 5, 200], dtype=torch.uint8)
    i32 = torch.tensor([1, -2, 3], dtype=torch.int32)
    functions: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: x + 200, x8),
        (lambda x: x + (-1), u8),
        (lambda x: x > 300, u8),
        (lambda x: 255 - x, u8),
        (lambda x: x + 2**40, i32),
        (lambda x: (x << 3) + (x >> 1), x8),
        (lambda x: x > 1e300, torch.tensor([1.0, float("inf")])),
        (lambda x: x * 1e6, torch.tensor([1.0, -2.0]).half()),
    ]
    for function, x in functions:
        assert_forward_equal(trace_step(function, 1, 0, 1, (x,)), function, (x,))


def test_sums_over_dimensions_of_size_one_are_exact() -> None:
    """Checks sums of one element each. They move no elements, but promote dtypes like other sums."""
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.sum(0),
        lambda x: x.sum(0, keepdim=True) + x,
        lambda x: x.half().mean(0),
    ]
    for x in (torch.randn(1, 4), torch.arange(4, dtype=torch.int32)[None], torch.ones(1, 4).bool()):
        for function in functions:
            trace = trace_step(function, 1, 0, 1, (x,))
            (actual,) = evaluate(trace.forward.graph, (x.view(trace.step_shape),), trace.step_shape)
            assert_same(actual, function(x))


def test_python_scalars_that_are_captured_are_constants() -> None:
    tau, threshold, on = 2, 1.0, True
    x = torch.tensor([1.9, 2.0, 2.1])
    trace = trace_step(lambda x: (x / tau >= threshold) & on, 1, 0, 1, (x,))
    assert trace.lifted == ()
    assert_forward_equal(trace, lambda x: (x / tau >= threshold) & on, (x,))


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.nn.functional.softplus(x),
    lambda x: torch.nn.functional.hardtanh(x, -0.5, 0.5),
    lambda x: torch.nn.functional.leaky_relu(x, 0.1),
    lambda x: torch.relu(x) + x.clamp(-1, 1) + x.abs(),
    lambda x: torch.heaviside(x, torch.tensor(0.5, dtype=x.dtype)),
    lambda x: x.masked_fill(x > 0, 0.25),
    lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 0.5) + x,
    lambda x: x.new_full(x.shape, 2.0) * x + torch.zeros(x.shape, dtype=x.dtype),
    lambda x: x.to(torch.float32).to(x.dtype) + x.round() + x.floor() + x.sign(),
    lambda x: torch.maximum(x, -x) - torch.minimum(x, x * x),
    lambda x: torch.nan_to_num(x / (x - x), nan=1.0),
    lambda x: torch.where(x.isnan() | x.isinf(), 0.0, x) ** 2,
    lambda x: torch.frexp(x)[0] * 2.0 + torch.frexp(x)[1],
    lambda x: torch.copysign(x * 2, -x) + torch.fmod(x, 0.3) + torch.remainder(x, 0.3),
    lambda x: 2.0**x,
    lambda x: torch.special.erfcx(x),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_composite_functions_equal_eager_mode(number: int) -> None:
    """Tests composite functions, whose decompositions contain constants, copies and conversions.

    The tolerance is a few units in the last place, because torch's vectorised softplus differs from its definition.
    """
    x = torch.linspace(-2, 2, 81, dtype=torch.float64)
    trace = trace_step(FUNCTIONS[number], 1, 0, 1, (x,))
    assert_forward_equal(trace, FUNCTIONS[number], (x,), rtol=1e-15)
