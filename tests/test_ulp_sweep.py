"""`benchmarks/ulp_sweep.py`: the sweep covers every rule, counts errors of results, and writes a page of its
measurements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import ulp_cases
import ulp_sweep

from flexsn_codegen import pointwise, supported_ops

Function = Callable[..., Any]

CPU = torch.device("cpu")
# The rules are listed at import time, before other tests add rules.
RULES = supported_ops()
CASES, UNCOVERED = ulp_cases.cases()


def test_sweep_covers_every_rule() -> None:
    # test_random_numbers.py compares the bits of random numbers. test_codegen_random.py tests views as another dtype.
    tested_elsewhere = ("flexsn_graph", "aten.view.dtype")
    assert all("polynomial" in op or op.startswith(tested_elsewhere) for op in UNCOVERED), UNCOVERED
    functions_by_signature: dict[tuple[torch.dtype, int], list[Function]] = {}
    for case in CASES:
        dtype = torch.float32 if torch.float32 in case.dtypes else torch.int32
        functions_by_signature.setdefault((dtype, case.arity), []).append(case.function)
    covered = set()
    for (dtype, arity), functions in functions_by_signature.items():
        arguments = [torch.empty(3, dtype=dtype, device="meta")] * arity
        for begin in range(0, len(functions), 8):  # tracing eight functions at once takes about as long as tracing one
            step = pointwise(combine(functions[begin : begin + 8])).traced(*arguments).step
            covered |= {str(node.target) for node in step.graph.nodes}
    # Graphs of real numbers do not contain this op.
    assert {str(op) for op in RULES} - covered - set(UNCOVERED) == {"prims.conj_physical.default"}


def combine(functions: Sequence[Function]) -> Callable[..., tuple[Tensor, ...]]:
    def call_all(*arguments: Tensor) -> tuple[Tensor, ...]:
        results = [function(*arguments) for function in functions]
        return tuple(t for result in results for t in ((result,) if isinstance(result, Tensor) else result))

    return call_all


def test_sweep_covers_all_half_values_and_edges_of_float32() -> None:
    (case,) = (c for c in CASES if c.name == "exp")

    def sweep_arguments(dtype: torch.dtype) -> Tensor:
        return torch.cat([x for (x,) in ulp_cases.chunks(case, dtype, ulp_cases.QUICK, CPU)])

    for dtype in (torch.float16, torch.bfloat16):
        assert sweep_arguments(dtype).view(torch.int16).unique().numel() == 2**16
    x = sweep_arguments(torch.float32)
    info = torch.finfo(torch.float32)
    for value in (0.0, 1.0, 88.72284, info.max, info.tiny, 2.0**-149, math.inf):
        assert (x == value).any(), value
        assert (x == -value).any(), value
    assert (torch.signbit(x) & (x == 0)).any()
    assert x.isnan().any()
    assert ((x != 0) & (x.abs() < info.tiny)).sum() > 10


def test_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def exp_with_errors(x: Tensor) -> Tensor:
        """Computes `exp` with three errors: e^2 is too large by 3 ulp, infinity is NaN, and 0 is -0."""
        y = torch.exp(x)
        y = torch.where(x == 2, (y.view(torch.int32) + 3).view(torch.float32), y)
        return torch.where(y.isinf(), math.nan, torch.where(y == 0, -0.0, y))

    monkeypatch.setattr(ulp_sweep, "pointwise", lambda function, **_: exp_with_errors)
    row = ulp_sweep.measure("exp", torch.float32, ulp_cases.QUICK, CPU)
    assert (row.skipped, row.failed) == ("", "")
    assert row.ulp == 3
    assert row.over
    assert row.worst.startswith("2: 7.38905")
    assert row.nan > 0
    assert "nan, eager inf" in row.nan_at
    assert row.zero > 0
    assert "-0, eager 0" in row.zero_at
    assert row.off is not None
    assert row.off[0] == 3
    assert row.off[1] <= 1
    assert row.nan + row.zero < row.differ < row.values


def test_equal_results_have_no_error(interpreted: None) -> None:
    row = ulp_sweep.measure("mul", torch.float32, ulp_cases.QUICK, CPU)
    assert row.values > 5000
    assert (row.differ, row.ulp, row.over) == (0, 0, False)


def test_page_lists_exceeded_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ulp_sweep.Row("exp", "float32", limit=2, values=10, differ=1, ulp=5, worst="1: 2, eager 3")
    equal = ulp_sweep.Row("mul", "float32", limit=0, values=10)
    text = ulp_sweep.page([row, equal], {"prims.new.default": "why"}, "", 1.0)
    assert "1 are over without a reason" in text
    assert "| exp | float32 | **not known** |" in text
    assert "| 5 **over** |" in text
    assert "| mul | float32 | 10 |" in text
    assert "| `prims.new.default` | all | why |" in text
    monkeypatch.setitem(ulp_sweep.EXCEPTIONS, "exp float32", "it is hot")
    text = ulp_sweep.page([row, equal], {}, "", 1.0)
    assert "1 are named exceptions, 0 are over without a reason" in text
    assert "| exp | float32 | it is hot |" in text
    assert "**" not in text


def test_exceptions_need_small_errors_of_kernels() -> None:
    row = ulp_sweep.Row("erfcx", "float32", limit=2, values=10, differ=1, ulp=65, off=(2, 65))
    assert row.over
    assert row.reason == ulp_sweep.EXCEPTIONS["erfcx"]
    row.off = (3, 65)
    assert row.reason == ""


def test_every_exception_names_a_case() -> None:
    names = {case.name for case in CASES}
    assert {name.removesuffix(" float32").removesuffix(" float64") for name in ulp_sweep.EXCEPTIONS} <= names
    assert names >= ulp_sweep._ACCURATE
