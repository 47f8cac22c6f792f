"""Kernels accept numbers, keywords, lists, None and captured tensors, and return lists and dicts."""

from __future__ import annotations

import math
import warnings
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import ArgumentError, TraceError, UnsupportedOpError, pointwise

X = torch.linspace(-3, 3, 11)


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    """Sets up kernels in C++, as in a process without TRITON_INTERPRET."""
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)


def count_traces(kernel: Any) -> int:
    """Returns the number of traces of a kernel."""
    return sum(len(traces) for entry in kernel._kernels.all() for traces in entry._variants.values())


@pytest.mark.long(all_but=["*calls1", "*calls2", "*calls5"])
# Python computes in float64 the values that each function derives from its numbers.
@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda x, a: x * a + a, [(0.1,), (1 / 3,), (-2.5,), (0.0,), (math.inf,)]),
        (lambda x, n: x - 0.9**n, [(1,), (2,), (30,), (0,)]),
        (lambda x, n: x / math.sqrt(1 - 0.999**n), [(1,), (2,), (1000,)]),
        (lambda x, a, b: x.clamp(min=min(a, b), max=max(a, b)), [(0.5, 1.5), (2.5, -1.0)]),
        (lambda x, a: (x / a).to(torch.bfloat16) * a, [(3.0,), (7.0,), (0.1,)]),
        (lambda x, a: torch.full_like(x, a) + torch.where(x > a, a, -a), [(0.3,), (0.7,)]),
        (lambda x, n: x.to(torch.int32) * n + (n >> 1), [(3,), (8,), (-5,)]),
        (lambda x, a: x + abs(a) % 1.5 + a // 2 + (-a) + round(a, 1), [(3.25,), (-0.75,)]),
    ],
)
def test_numbers_are_arguments(function: Any, calls: list[tuple[Any, ...]]) -> None:
    kernel = pointwise(function)
    for numbers in calls:
        actual, expected = kernel(X, *numbers), function(X, *numbers)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=0, equal_nan=True)
    assert count_traces(kernel) <= 2


def test_numbers_are_exact_in_float64() -> None:
    x = X.double()
    kernel = pointwise(lambda x, a: x * a)
    for a in (0.1, 1 / 3, 5e-324, -0.0, 1e308):
        assert torch.equal(kernel(x, a), x * a)
        assert torch.equal(kernel(x, a).signbit(), (x * a).signbit())
    assert count_traces(kernel) == 1


@pytest.mark.long(all_but=["<lambda>0", "<lambda>3"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * 2 if n > 3 else x - n,
        lambda x, n: x * sum(range(n)),
        lambda x, n: x**n,
        lambda x, n: x * sqrt(n),  # `sqrt` cannot be traced
        lambda x, n: x.lerp(-x, n / 8),
        lambda x, n: x * (n % 2) + x * (1.0 if n else 2.0),
        lambda x, n: x.sigmoid() if math.isnan(n) else x * int(n / 2),
    ],
)
def test_numbers_that_decide_branches_are_compiled_again(function: Any) -> None:
    kernel = pointwise(function)
    for n in (1, 2, 5, 7, 2, 0, 5):
        torch.testing.assert_close(kernel(X, n), function(X, n), rtol=5e-7, atol=1e-7)
    assert count_traces(kernel) <= 6


def test_kernels_per_value_are_bounded_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsn_codegen.functions import _kernel

    monkeypatch.setattr(_kernel, "_MAX_VARIANTS", 2)
    kernel = pointwise(lambda x, n: x * float(n))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (1, 2, 3):
            assert torch.equal(kernel(X, n), X * n)
    assert count_traces(kernel) == 1
    assert any("for other numbers" in str(warning.message) for warning in caught)


def test_gradients_depend_on_the_current_numbers() -> None:
    kernel = pointwise(lambda x, a: torch.tanh(x * a), autograd=True)
    for a in (0.5, 2.0):
        actual, expected = (X.clone().double().requires_grad_() for _ in range(2))
        kernel(actual, a).sum().backward()
        torch.tanh(expected * a).sum().backward()
        torch.testing.assert_close(actual.grad, expected.grad)


def test_arguments_are_bound_by_the_functions_signature() -> None:
    def function(x: Tensor, /, scale: float = 2.0, *, bias: Tensor | None = None, mode: str = "add") -> Tensor:
        y = x * scale
        if bias is None:
            return y
        return y + bias if mode == "add" else y - bias

    kernel: Any = pointwise(function)
    calls: list[Any] = [((X,), {}), ((X, 3), {"bias": X}), ((X,), {"bias": X[:1], "mode": "sub", "scale": 0.5})]
    for args, named in calls:
        assert torch.equal(kernel(*args, **named), function(*args, **named))
    with pytest.raises(ArgumentError, match=r"function\(x.*cannot be called like this: .*'bais'"):
        kernel(X, bais=X)
    with pytest.raises(ArgumentError, match=r"argument 1 of function is a object"):
        kernel(X, object())


def test_arguments_and_results_may_be_lists_and_dicts() -> None:
    def function(xs: list[Tensor], betas: tuple[float, float], more: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": xs[0] * betas[0] + xs[1] * betas[1], "rest": [more["z"].exp(), (xs[0] > 0, None)]}

    actual = pointwise(function)([X, X + 1], (0.9, 0.1), {"z": X})
    expected = function([X, X + 1], (0.9, 0.1), {"z": X})
    torch.testing.assert_close(actual["sum"], expected["sum"])
    assert isinstance(actual["rest"], list)
    assert torch.equal(actual["rest"][1][0], X > 0)
    assert actual["rest"][1][1] is None


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 11))
        self.bias = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Buffer(torch.ones(11))
        self.power = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight + self.bias) * self.power + self.shift


def test_modules_have_gradients_and_are_read_at_each_call() -> None:
    module = Affine()
    kernel = pointwise(module, autograd=True)

    def compare() -> None:
        x = X.expand(3, 11)
        grads = []
        for function in (kernel, module):
            module.zero_grad()
            result = function(x)
            result.backward(torch.linspace(-1, 1, 33).reshape(3, 11))
            grads.append([result.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
        assert len(grads[0]) == 3
        for a, e in zip(*grads, strict=True):
            torch.testing.assert_close(a, e)

    compare()
    with torch.no_grad():
        module.weight.mul_(2)  # the parameter is updated
    compare()
    module.shift = nn.Buffer(torch.zeros(11))  # the buffer is replaced
    module.weight = nn.Parameter(torch.rand(11))
    compare()
    module.power = 3.0  # the power is a constant of the trace
    compare()


def test_closures_over_tensors_have_gradients() -> None:
    w = torch.rand(11, dtype=torch.float64, requires_grad=True)
    kernel = pointwise(lambda x: (x * w).sin(), autograd=True)
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: kernel(x), (x, w))
    kernel(x).sum().backward()
    torch.testing.assert_close(w.grad, (x * (x * w).cos()).detach())


def test_errors_and_comments_name_the_users_line() -> None:
    module = Affine()

    def scaled(x: Tensor, a: float) -> Tensor:
        return module(x) * a  # type: ignore[no-any-return]

    source = pointwise(scaled, autograd=True).source(X, 0.5).source
    assert "test_codegen_pointwise_calls.py" in source
    assert "_host_numbers.py" not in source
    assert "_substitute.py" not in source
    with pytest.raises(UnsupportedOpError, match=r"cumsum(.|\n)*at .*test_codegen_pointwise_calls.py"):
        pointwise(lambda x, a: (x * a).cumsum(0) + x)(X, 0.5)


def test_results_whose_structure_depends_on_numbers_are_refused() -> None:
    kernel = pointwise(lambda x, n: (x, x) if n > 1 else x * n)
    assert len(kernel(X, 2)) == 2
    with pytest.raises(TraceError, match="another structure"):
        kernel(X, 0)
