"""Tensors without memory are rejected with an error before a kernel reads or writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexsn_codegen import ArgumentError, pointwise

MESSAGE = "has no memory: it was freed"


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def zeros(tensor: Tensor) -> Tensor:
    return torch._efficientzerotensor(tensor.shape)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y


@pytest.mark.parametrize("lose", [freed, zeros])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_arguments_without_memory_are_refused(
    lose: Callable[[Tensor], Tensor], calls_before: int, compiler: None
) -> None:
    kernel, x, y = pointwise(gated), torch.rand(50, 37), torch.rand(37)
    for _ in range(calls_before):
        kernel(x, y)
    with pytest.raises(ArgumentError, match=MESSAGE):
        kernel(x, lose(y.clone()))
    with pytest.raises(ArgumentError, match=MESSAGE):
        kernel(lose(x.clone()), y)
    assert torch.equal(kernel(x[:0], y), x[:0])  # an empty tensor has no memory either


@pytest.mark.parametrize("calls_before", [0, 2])
def test_results_without_memory_are_refused(calls_before: int, compiler: None) -> None:
    kernel, x, y, out = pointwise(gated), torch.rand(50, 37), torch.rand(37), torch.empty(50, 37)
    for _ in range(calls_before):
        kernel.into(out, x, y)
    with pytest.raises(ArgumentError, match=MESSAGE):
        kernel.into(freed(out), x, y)


@pytest.mark.parametrize("lose", [freed, zeros])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_lists_with_tensors_without_memory_are_refused(
    lose: Callable[[Tensor], Tensor], calls_before: int, compiler: None
) -> None:
    kernel, y = pointwise(gated), torch.rand(37)
    xs = [torch.rand(50, 37), torch.rand(0, 37), torch.rand(3, 37)]
    for _ in range(calls_before):
        kernel.foreach(xs, y)
    with pytest.raises(ArgumentError, match=MESSAGE):
        kernel.foreach([*xs[:2], lose(xs[2].clone())], y)


def test_gradients_without_memory_are_refused(compiler: None) -> None:
    kernel, x = pointwise(gated, autograd=True), torch.rand(50, 37, requires_grad=True)
    y = torch.rand(37, requires_grad=True)
    result = kernel(x, y)
    for gradient in torch.autograd.grad(result, [x, y], zeros(result), retain_graph=True):
        assert not gradient.any()
    with pytest.raises(ArgumentError, match=MESSAGE):
        torch.autograd.grad(result, [x, y], freed(torch.ones_like(result)), retain_graph=True)
    freed(y.detach())
    with pytest.raises(ArgumentError, match=MESSAGE):
        torch.autograd.grad(result, [x, y], torch.ones_like(result))
