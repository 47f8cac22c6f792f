"""Functions that reduce the last dimension, in one forward and one backward kernel, compared with eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import OfflineJob, UnsupportedOpError, compile_offline, pointwise
from flexsn_codegen.__main__ import main
from flexsn_codegen.targets.cpp import CPP
from flexsn_codegen.targets.triton import TRITON
from flexsn_graph import cells_gradient_of, trace_cells

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]
Function = Callable[..., Any]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def softmax(x: Tensor, temperature: float) -> Tensor:
    return torch.softmax(x / temperature, -1)


def log_softmax(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).log_softmax(-1)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return x / scale, scale.squeeze(-1)


def adam_mini(g: Tensor, v: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    v = beta * v + (1 - beta) * g.square().mean(-1, keepdim=True)
    return g / (v.sqrt() + 1e-8), v


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)


def distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.logsumexp(x - y, -1), (x - y).amin(-1)


CASES: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "RMSNorm": (rms_norm, ((5, 7, 130), (130,))),
    "RMSNorm of a transposed tensor": (lambda x, w: rms_norm(x.t(), w), ((130, 9), (130,))),
    "LayerNorm": (layer_norm, ((6, 70), (70,), (70,))),
    "softmax": (softmax, ((3, 1, 65), 0.7)),
    "log_softmax": (log_softmax, ((4, 40), ())),
    "an amax and a scale": (scaled, ((9, 33),)),
    "Adam-mini": (adam_mini, ((9, 33), (9, 1), 0.9)),
    "std": (standardised, ((4, 50),)),
    "two tensors": (distances, ((4, 5, 20), (5, 20))),
    "three colours": (standardised, ((4, 5, 3),)),
    "one row": (standardised, ((90,),)),
    "rows of one element": (softmax, ((6, 1), 2.0)),
    "no rows": (rms_norm, ((0, 15), (15,))),
    "a gradient inside": (lambda x: torch.func.grad(lambda y: (y * y).sum())(x) * x, ((40,),)),
    "half of a row": (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].softmax(-1), ((4, 40),)),
}


def make_arguments(case: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> list[Any]:
    values = [draw(*entry, dtype=dtype, seed=i) if isinstance(entry, tuple) else entry for i, entry in enumerate(case)]
    return [value.abs() + 0.5 if isinstance(value, Tensor) and i else value for i, value in enumerate(values)]


def list_results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.long(all_but=["RMSNorm", "Adam-mini", "three colours"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_eager_mode(name: str) -> None:
    function, case = CASES[name]
    ours = [a.requires_grad_() if isinstance(a, Tensor) else a for a in make_arguments(case)]
    theirs = [a.requires_grad_() if isinstance(a, Tensor) else a for a in make_arguments(case)]
    actual, expected = list_results(pointwise(function)(*ours)), list_results(function(*theirs))
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, reference)
    weights = [torch.randn_like(e) for e in expected]
    leaves = [[a for a in side if isinstance(a, Tensor)] for side in (ours, theirs)]
    gradients = [torch.autograd.grad(r, side, weights) for r, side in zip((actual, expected), leaves, strict=True)]
    for result, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_equal_eager_mode(dtype: torch.dtype) -> None:
    for function, case in (CASES["RMSNorm"], CASES["an amax and a scale"]):
        tensors = make_arguments(case, dtype)
        for ours, theirs in zip(
            list_results(pointwise(function)(*tensors)), list_results(function(*tensors)), strict=True
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)


def test_gradients_pass_gradgradcheck() -> None:
    x, weight = draw(2, 10).requires_grad_(), draw(10).requires_grad_()
    kernel = pointwise(rms_norm)
    assert torch.autograd.gradcheck(kernel, (x, weight))
    assert torch.autograd.gradgradcheck(kernel, (x, weight))


def test_maximum_propagates_nan() -> None:
    x = draw(3, 30, dtype=torch.float32)
    x[1, 7] = math.nan
    torch.testing.assert_close(pointwise(scaled)(x)[1], scaled(x)[1], equal_nan=True)


def test_forward_and_backward_have_one_step_each() -> None:
    x, weight = draw(6, 40), draw(40)
    forward = trace_cells(rms_norm, (x, weight), (True, True), "rms_norm")
    gradient = cells_gradient_of(rms_norm, 2, (True,), (True, True))
    backward = trace_cells(gradient, (x, weight, x), (False,) * 3, "gradient", gradient=True)
    assert [len(forward.steps), len(backward.steps)] == [1, 1]
    # The trace is valid for any number of rows, but not for another width.
    assert forward.free == ((0, None), (None,))


def test_other_numbers_of_rows_and_temperatures_equal_eager_mode() -> None:
    kernel = pointwise(softmax)
    for rows, temperature in ((3, 0.5), (8, 0.5), (3, 2.0)):
        x = draw(rows, 20)
        torch.testing.assert_close(kernel(x, temperature), softmax(x, temperature))


def test_compiled_code_and_vmap_equal_eager_mode() -> None:
    kernel, x, weight = pointwise(rms_norm), draw(6, 40), draw(40)
    expected = rms_norm(x * 2, weight)
    compiled = torch.compile(lambda x, w: kernel(x * 2, w), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), expected)
    torch.testing.assert_close(torch.func.vmap(kernel, (0, None))(x * 2, weight), expected)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: x - x.mean(0), r"aten\.mean\.dim reduces dimension 0 of 2(.|\n)*test_codegen_rows"),
        (lambda x: x - x.mean(), r"aten\.mean\.default reduces dimensions 0, 1 of 2"),
        (lambda x: x.sum((0, 1)), r"reduces dimensions 0, 1 of 2, but a kernel can only reduce the last dimension"),
        (lambda x: x.amax(0), r"aten\.amax\.default reduces dimension 0 of 2"),
        (lambda x: (x > 0).to(torch.int32).amax(-1), r"aten\.amax\.default reduces torch\.int32"),
        (lambda x: x - x.sum(-1, keepdim=True) * x.t().sum(-1)[0], "rows of 9 elements, but other rows have 20"),
        (lambda x: x.cumsum(-1), r"aten\.cumsum\.default does not work element by element"),
        (lambda x: x / x.prod(-1, keepdim=True), r"aten\.prod\.dim_int"),
    ],
)
def test_other_reductions_are_refused(function: Function, match: str) -> None:
    with pytest.raises(UnsupportedOpError, match=match):
        pointwise(function)(draw(9, 20))


def test_rows_without_elements_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="reduces rows without elements"):
        pointwise(lambda x: x - x.mean(-1, keepdim=True))(draw(3, 0))


def test_sources_contain_few_sums_and_no_spills() -> None:
    x, weight = torch.empty(64, 300, device="meta"), torch.empty(300, device="meta")
    kernel = pointwise(rms_norm)
    assert "dev::row_sum" in kernel.source(x, weight, target=CPP).source
    assert pointwise(softmax).source(x, 0.7, target=CPP).source.count("= dev::exp(") == 1
    source = kernel.source(x, weight, target=TRITON)
    assert source.source.count("dev.row_sum") == 1
    (use,) = compile_offline([OfflineJob(source, "sm_90")])
    assert use.spilled_bytes == 0


def test_too_large_rows_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="at most 65536 elements, but these rows have 70000"):
        pointwise(standardised).source(torch.empty(2, 70_000, device="meta"), target=TRITON)


def test_only_files_in_cpp_can_stand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "rows_alone.py").write_text("def doubled(x):\n    return x * x.mean(-1, keepdim=True)\n")
    monkeypatch.chdir(tmp_path)
    show = ["show", "rows_alone:doubled", "--arguments", "float32:5x40", "--standalone"]
    assert main([*show, "--target", "cpp"]) == 0
    assert "row_sum" in capsys.readouterr().out
    assert main(show) != 0
    assert "pass --target cpp" in capsys.readouterr().err
