"""Pointwise functions whose decompositions differ from torch's tables equal eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import pointwise
from flexsn_codegen.targets.cpp import CPP

HALVES = [torch.bfloat16, torch.float16]


def make_tensor(dtype: torch.dtype, low: float = -3.0, high: float = 3.0) -> Tensor:
    return torch.linspace(low, high, 77).to(dtype).reshape(7, 11)


def assert_same_with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    differentiated = [t for t in leaves if t.requires_grad]
    expected, actual = function(*leaves), pointwise(function, autograd=True)(*leaves)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, equal_nan=True)
    weight = torch.linspace(-1, 1, expected.numel()).to(expected.dtype).reshape(expected.shape)
    gradients = (torch.autograd.grad(r, differentiated, weight, allow_unused=True) for r in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.long(all_but=["xlogy-dtype1", "special_xlog1py-dtype0"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", [torch.xlogy, torch.special.xlog1py])
def test_logarithm_is_rounded_first(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, y = make_tensor(dtype, -2, 2), make_tensor(dtype, 0, 3).flip(1)
    assert torch.equal(pointwise(function)(x, y), function(x, y))
    assert torch.equal(pointwise(lambda x: function(x, 0.3))(x), function(x, 0.3))
    assert torch.equal(pointwise(lambda y: function(0.3, y))(y), function(0.3, y))


@pytest.mark.long(all_but=["True-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_gaussian_nll_loss_equals_eager_mode(dtype: torch.dtype, full: bool) -> None:
    def loss(mean: Tensor, target: Tensor, variance: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(mean, target, variance, full=full, reduction="none")

    assert_same_with_gradients(loss, make_tensor(dtype), make_tensor(dtype).flip(0), make_tensor(dtype, 0.0, 2.0))


def test_negative_variance_gives_nan() -> None:
    def loss(x: Tensor, variance: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(x, x, variance, reduction="none")

    x = torch.ones(3)
    assert pointwise(loss)(x, torch.tensor([1.0, -1.0, 0.0])).isnan().tolist() == [False, True, False]


@pytest.mark.long(all_but=["dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantization_equals_eager_mode(dtype: torch.dtype) -> None:
    x = make_tensor(dtype, -20, 20)
    scale, zero = torch.linspace(0.05, 0.3, 11), torch.arange(11, dtype=torch.int32)
    assert_same_with_gradients(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127), x)

    def per_tensor(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale.detach(), zero, 0, 255)

    def per_channel(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(x, scale.detach(), zero, 1, 0, 255)

    if dtype == torch.float32:  # eager mode supports this in float32 only
        assert_same_with_gradients(per_tensor, x, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32))
        assert_same_with_gradients(per_channel, x, scale, zero)


NAN, INFINITY = float("nan"), float("inf")
LIMITS = [(0.0, 1.0), (-0.0, 1), (0.3, 0.2), (None, 0.3), (0.3, None), (NAN, 1.0), (0.0, NAN), (None, -0.0), (-1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_take_one_comparison_each(dtype: torch.dtype) -> None:
    def clamped(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clamp(low, high) for low, high in LIMITS)

    x = torch.tensor([0.0, -0.0, 1, NAN, INFINITY, -INFINITY, 0.3, 0.2998, 0.30078125, -5], dtype=dtype)
    for actual, expected in zip(pointwise(clamped)(x), clamped(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(actual.nan_to_num().signbit(), expected.nan_to_num().signbit())
    source = pointwise(lambda x: x.clamp(-1, 2)).source(x, target=CPP).source
    assert [sign in source for sign in (" < ", " > ", "!=", "|")] == [True, True, False, False]
