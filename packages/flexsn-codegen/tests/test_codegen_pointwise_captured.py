"""Captured tensors may broadcast along any dimension, and values that a function reads are read at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_codegen import pointwise
from flexsn_codegen.functions._prepared import PreparedCalls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
W = nn.Parameter(torch.rand(6, device=DEVICE))
X = torch.randn(2, 6, 3, 5, device=DEVICE, requires_grad=True)


def make_norm() -> nn.Module:
    module = nn.BatchNorm2d(6, device=DEVICE).eval()
    for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 2.0)
    return module


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "prelu": nn.PReLU(6, device=DEVICE),
    "prelu_of_one": nn.PReLU(device=DEVICE),
    "norm": make_norm(),
    "index": lambda x: x * W[:, None, None],
    "view": lambda x: (x * W.view(1, -1, 1, 1).exp() + 1).sin(),
    "halves": lambda x: x.chunk(2, 1)[0] * W[:3, None, None],
}


def differentiate(function: Callable[..., Any], *parameters: Tensor) -> list[Tensor]:
    y = function(X)
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).to(y).view_as(y)).sum(), (X, *parameters))]


def list_parameters(function: Callable[..., Any]) -> list[Tensor]:
    return list(function.parameters()) if isinstance(function, nn.Module) else [W]


@pytest.mark.long(all_but=["prelu", "index", "halves"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_tensors_may_broadcast_along_any_dimension(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = list_parameters(function)
    for a, e in zip(
        differentiate(pointwise(function, autograd=True), *parameters),
        differentiate(function, *parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.long(all_but=["prelu"])
@pytest.mark.parametrize("name", ["prelu", "view", "halves"])
def test_captured_tensors_may_broadcast_along_any_dimension_in_one_graph(name: str) -> None:
    function = FUNCTIONS[name]
    parameters, kernel = list_parameters(function), pointwise(function, autograd=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: kernel(x) * 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for a, e in zip(differentiate(compiled, *parameters), differentiate(function, *parameters), strict=True):
        torch.testing.assert_close(a, e)


def test_values_that_a_cutting_function_reads_are_read_at_each_call() -> None:
    scale = 2.0
    x = X.detach()
    kernel = pointwise(lambda x: x.chunk(2, 1)[0] * scale)
    torch.testing.assert_close(kernel(x), x[:, :3] * 2)
    scale = 3.0
    torch.testing.assert_close(kernel(x), x[:, :3] * 3)
    module = nn.PReLU(6, device=DEVICE)
    kernel = pointwise(module)
    with torch.no_grad():
        for weight in (module.weight, nn.Parameter(torch.rand(6, device=DEVICE))):
            module.weight = weight
            weight.mul_(2)
            torch.testing.assert_close(kernel(x), module(x))


def test_repeated_call_reads_all_values_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    call = PreparedCalls.call

    def record_call(calls: PreparedCalls, *arguments: Any) -> Any:
        result = call(calls, *arguments)
        prepared.append(isinstance(result, Tensor))
        return result

    monkeypatch.setattr(PreparedCalls, "call", record_call)
    weight, offset = torch.rand(5, device=DEVICE), 1.0

    def function(x: Tensor, scale: float, *, up: bool = False) -> Tensor:
        y = x * weight * scale + offset
        return y + 1 if up and scale > 0.75 else y

    kernel = pointwise(function, autograd=True)
    x = X.detach()
    cases: list[tuple[Tensor, float, bool, bool]] = [
        (x, 0.5, False, False),
        (x + 1, 0.25, False, True),
        (x, 0.5, True, False),  # the constant changes
        (x, 0.6, True, True),
        (x, 0.8, True, False),  # another branch is taken
        (x.transpose(0, 2).contiguous().transpose(0, 2), 0.5, False, False),
        (x.double(), 0.5, False, False),
        (X, 0.5, False, False),  # a gradient is required
        (x, 0.5, False, True),
    ]
    for tensor, scale, up, is_repeated in cases:
        torch.testing.assert_close(kernel(tensor, scale, up=up), function(tensor, scale, up=up))
        assert prepared.pop() is is_repeated, (scale, up)
    for change in ("offset", "weight", "shape", "gradient"):
        if change == "offset":
            offset = 2.0
        elif change == "weight":
            weight = torch.rand(5, device=DEVICE)
        elif change == "shape":
            weight.data = torch.rand(1, device=DEVICE)
        else:
            weight.requires_grad_()
        y = kernel(x, 0.5)
        torch.testing.assert_close(y, function(x, 0.5))
        assert y.requires_grad is (change == "gradient")
