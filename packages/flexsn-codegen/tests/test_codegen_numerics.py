"""`precision` and `fast_math` change results only if they are set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codegen_cores import graph_of
from torch import Tensor

from flexsn_codegen import (
    OfflineJob,
    PrecisionError,
    compile_offline,
    compile_options,
    emit_core,
    generate_triton_code_str,
    pointwise,
)

HALVES = [torch.float16, torch.bfloat16]


def step(x: Tensor, y: Tensor) -> Tensor:
    return (x * y + y) / 3.0 - torch.tanh(x * 0.1)


def draw_halves(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(2, 4096).to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_precision_rounds_once_and_eager_precision_after_each_op(dtype: torch.dtype) -> None:
    x, y = draw_halves(dtype)
    rounded = step(x.float(), y.float()).to(dtype)
    assert not torch.equal(rounded, step(x, y))  # otherwise, the comparisons below would be meaningless
    assert torch.equal(pointwise(step, precision="float32")(x, y), rounded)
    assert torch.equal(pointwise(step)(x, y), step(x, y))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_have_the_precision_of_their_kernel(dtype: torch.dtype) -> None:
    def gradients(function: Any, *arguments: Tensor) -> list[Tensor]:
        leaves = [a.requires_grad_() for a in arguments]
        return list(torch.autograd.grad(function(*leaves), leaves, torch.ones_like(leaves[0])))

    x, y = draw_halves(dtype)
    actual = gradients(pointwise(step, autograd=True, precision="float32"), x.clone(), y.clone())
    for a, b in zip(actual, gradients(step, x.float(), y.float()), strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_float32_precision_ignores_conversions_between_halves() -> None:
    x = torch.tensor([1.0 + 2**-20, 70000.0], dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return x.half().bfloat16().float() - 1.0

    assert torch.equal(pointwise(function, precision="float32")(x), x.float() - 1.0)
    assert torch.equal(pointwise(function)(x), function(x))


def test_float32_precision_rounds_results_so_that_a_state_equals_the_stored_value() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = v + x * 0.1
        return (h > 1).to(x), h - x, v

    graph = graph_of(core, *torch.zeros(2, 4, dtype=torch.bfloat16), names=("input_0", "state_0"))
    for text in (
        emit_core(graph, "core", prune=True, precision="float32").source,
        generate_triton_code_str(graph, "core", precision="float32")[0],
    ):
        *body, last = text.splitlines()
        assert not any("dev.round" in line for line in body)
        assert last.count("dev.round_bfloat16(") == 2
        assert last.endswith(", state_0")  # unchanged
    assert emit_core(graph, "core", prune=True).source.splitlines()[-1].count("dev.round") == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_neighbours_of_rounded_values_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.5, 0.0, 300.0]).to(dtype)

    def function(x: Tensor) -> Tensor:
        return torch.nextafter(x + x * 1e-4, x + 1)

    assert torch.equal(pointwise(function, precision="float32")(x), torch.nextafter(x, x + 1))


@pytest.mark.parametrize(
    ("precision", "near"), [("floot32", "float32"), ("Eager", "eager"), ("tf32", "float32"), (1, "")]
)
def test_unknown_precision_is_named_with_a_suggestion(precision: Any, near: str) -> None:
    graph = graph_of(step, torch.zeros(4), torch.zeros(4))
    for make in (
        lambda: pointwise(step, precision=precision),
        lambda: emit_core(graph, "core", prune=True, precision=precision),
        lambda: generate_triton_code_str(graph, "core", precision=precision),
    ):
        with pytest.raises(PrecisionError, match=f"{precision!r}; did you mean '{near}.*'eager' and 'float32'"):
            make()
    assert issubclass(PrecisionError, ValueError)


def fast(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(x) * torch.tanh(y) + torch.exp2(x) / y - torch.sqrt(y) + torch.rsqrt(y * y) + torch.log(y) + y**x


FUNCTIONS = ("div", "exp", "exp2", "pow", "sqrt", "tanh")


def test_only_fast_math_calls_fast_functions() -> None:
    graph = graph_of(fast, torch.zeros(4), torch.zeros(4))
    exact, fast_source = (emit_core(graph, "core", prune=True, fast_math=f).source for f in (False, True))
    assert [f for f in FUNCTIONS if f"dev.{f}(" in exact and f"dev.fast_{f}(" in fast_source] == list(FUNCTIONS)
    assert "dev.fast_" not in exact
    assert "dev.log(" in fast_source  # `log` has no faster form


def test_fast_math_applies_to_functions_inside_of_rules_and_to_the_backward() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) + x**-2.0

    x = torch.rand(9) + 0.5
    kernel = pointwise(function, autograd=True, fast_math=True)
    assert "dev.fast_div(" in kernel.source(x).source
    torch.testing.assert_close(kernel(x), function(x))
    backward = kernel.gradient([x.requires_grad_()], (True,))
    assert "dev.fast_tanh(" in backward.source(x, x).source


def test_compile_options_only_contain_options_that_the_backend_has() -> None:
    assert compile_options("cuda") == {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    assert compile_options("cuda", fast_math=True) == {"enable_fp_fusion": True, "enable_reflect_ftz": True}
    assert compile_options("hip", fast_math=True) == {"enable_fp_fusion": True}


def test_fast_math_uses_instructions_of_the_gpu() -> None:
    arguments = torch.empty(2, 8, device="meta")

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y + 1.0) / torch.exp(y)

    jobs = [
        OfflineJob(pointwise(function, fast_math=f).source(*arguments), target, fast_math=f)
        for target in ("sm_90", "gfx942")
        for f in (False, True)
    ]
    strict, hasty, strict_amd, hasty_amd = compile_offline(jobs)
    for instruction in ("ex2.approx", "div.full"):
        assert instruction in hasty.assembly
    assert "div.rn.f32" in strict.assembly
    assert "div.full" not in strict.assembly
    assert "div.rn.f32" not in hasty.assembly
    # The sum in the argument takes two instructions in the exact code, and one in the fast code.
    assert "mul.rn.f32" in strict.assembly
    assert "mul.rn.f32" not in hasty.assembly
    assert len(hasty.binary) < len(strict.binary)
    assert len(hasty_amd.binary) < len(strict_amd.binary)


def test_fast_division_is_only_used_for_values_that_reach_no_comparison() -> None:
    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x / y > 1, y / x, x)

    def converted(x: Tensor, y: Tensor) -> Tensor:
        return gradient(x, y).to(torch.int32)  # the conversion has jumps, like a comparison

    inputs = torch.ones(2, 4)
    source = emit_core(graph_of(gradient, *inputs), "core", prune=True, fast_division=True).source
    assert "dev.div(x_1, y_1)" in source
    assert "dev.fast_div(y_1, x_1)" in source
    assert "fast_div" not in emit_core(graph_of(converted, *inputs), "core", prune=True, fast_division=True).source
    assert "fast_div" not in emit_core(graph_of(gradient, *inputs), "core", prune=True).source
