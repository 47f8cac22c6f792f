"""Under autograd, equal calls are analysed once, and each difference between calls is detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexsn_codegen import TransformError, pointwise
from flexsn_codegen.functions import _autograd
from flexsn_codegen.functions._kernel import Kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]

scale = 2.0


def draw(*shape: int, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_(requires_grad)


def scaled(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    return torch.sin(x) * weight * factor * scale


def two(x: Tensor, weight: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return x * x * weight, x > 0, weight * factor + x


def halves(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * weight, b * b * factor], -1)


def differentiate(function: Callable[..., Any], x: Tensor, weight: Tensor, factor: float, used: int = 3) -> list[Any]:
    """Returns the gradients of a sum over the first `used` floating-point results."""
    results = function(x, weight, factor)
    followed = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad][:used]
    differentiated = [t for t in (x, weight) if t.requires_grad]
    total = sum((r * torch.linspace(-1, 1, r.numel(), device=DEVICE, dtype=r.dtype).view_as(r)).sum() for r in followed)
    assert isinstance(total, Tensor)
    return [*followed, *torch.autograd.grad(total, differentiated, allow_unused=True)]


def assert_alike(
    function: Callable[..., Any], fused: Any, x: Tensor, weight: Tensor, factor: float, used: int = 3
) -> None:
    pairs = zip(
        differentiate(fused, x, weight, factor, used), differentiate(function, x, weight, factor, used), strict=True
    )
    for actual, expected in pairs:
        if actual is None or expected is None:
            # If the kernel returns zeros, eager mode may return no gradient.
            assert actual is None or not actual.any()
        else:
            torch.testing.assert_close(actual, expected)


@pytest.mark.long(all_but=["halves"])
@pytest.mark.parametrize("function", [scaled, two, halves])
def test_differences_from_the_earlier_call_are_detected(function: Callable[..., Any]) -> None:
    fused = pointwise(function)
    x, weight = draw(6, 8), draw(4) if function is halves else draw(8)
    for _ in range(3):
        assert_alike(function, fused, x, weight, 1.0)
    assert_alike(function, fused, x, weight, 3.0)
    assert_alike(function, fused, x, weight.detach(), 3.0)
    assert_alike(function, fused, x.detach(), weight, 3.0)
    assert_alike(function, fused, draw(5, 8), weight, 3.0)
    assert_alike(function, fused, draw(8, 6).t() if function is not halves else draw(6, 8), weight, 3.0)
    assert_alike(function, fused, x, weight, 3.0, used=1)
    with torch.no_grad():
        assert not any(r.requires_grad for r in torch.utils._pytree.tree_leaves(fused(x, weight, 1.0)))
    assert_alike(function, fused, x, weight, 1.0)


def test_numbers_that_a_function_reads_may_be_overwritten() -> None:
    global scale
    fused = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    try:
        for number in (2.0, 2.0, 5.0, 5.0):
            scale = number
            assert_alike(scaled, fused, x, weight, 1.0)
    finally:
        scale = 2.0


def test_captured_parameters_may_be_frozen_between_calls() -> None:
    module = nn.PReLU(8, dtype=torch.float64, device=DEVICE)
    fused = pointwise(module)
    x = draw(6, 8)
    for requires_grad in (True, True, False, False, True):
        module.weight.requires_grad_(requires_grad)
        actual = torch.autograd.grad(fused(x).sum(), [x, *([module.weight] if requires_grad else [])])
        expected = torch.autograd.grad(module(x).sum(), [x, *([module.weight] if requires_grad else [])])
        torch.testing.assert_close(actual, expected)


def test_repeated_call_passes_gradgradcheck() -> None:
    fused: Any = pointwise(scaled)
    x, weight = draw(3, 4), draw(4)
    for _ in range(3):
        assert_alike(scaled, fused, x, weight, 1.0)
    assert torch.autograd.gradgradcheck(lambda a, b: fused(a, b, 1.0), (x, weight))


def test_cotangents_may_have_any_layout() -> None:
    fused = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    for gradient in (
        draw(6, 8),
        draw(6, 8),
        draw(8, 6).t(),
        draw(1, 1).expand(6, 8),
        torch._efficientzerotensor(6, 8),
    ):
        cotangent = gradient.detach().to(DEVICE, torch.float64)
        actual = torch.autograd.grad(fused(x, weight), (x, weight), cotangent)
        expected = torch.autograd.grad(scaled(x, weight), (x, weight), cotangent)
        torch.testing.assert_close(actual, expected)


def test_tensor_that_changed_since_the_forward_is_refused() -> None:
    fused = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    for _ in range(2):
        fused(x, weight).sum().backward()
    result = fused(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_repeated_calls_are_not_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    for _ in range(2):
        fused(x, weight).sum().backward()

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the call is analysed again")

    monkeypatch.setattr(Kernel, "variant", refused)
    monkeypatch.setattr(_autograd, "gradients", refused)
    x.grad = weight.grad = None
    fused(x, weight).sum().backward()
    expected = torch.autograd.grad(scaled(x, weight).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_calls_have_the_gradients_of_eager_mode(use_reentrant: bool) -> None:
    fused: Any = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    (expected,) = torch.autograd.grad(scaled(x, weight).sum(), x)
    for _ in range(3):
        x.grad = None
        checkpoint(fused, x, weight, use_reentrant=use_reentrant).sum().backward()
        torch.testing.assert_close(x.grad, expected)


def test_gradients_that_autograd_batches_are_refused() -> None:
    fused = pointwise(scaled)
    x, weight = draw(6, 8), draw(8)
    for _ in range(2):
        result = fused(x, weight)
        with pytest.raises(TransformError, match=r"torch\.func\.jacrev"):
            torch.autograd.grad(result, x, torch.ones(2, 6, 8, dtype=x.dtype, device=DEVICE), is_grads_batched=True)
