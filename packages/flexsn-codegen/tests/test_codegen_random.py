"""Kernels draw the same random numbers and bits as eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexsn_codegen import ArgumentError, UnsupportedOpError, pointwise, random

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]


def dropout(x: Tensor, p: float, numbers: random.Numbers) -> Tensor:
    return torch.where(random.uniform(numbers) < p, 0.0, x / (1 - p)) + 0.1 * random.normal(numbers, draw=1)


def test_kernels_draw_the_numbers_of_eager_mode() -> None:
    kernel, numbers = pointwise(dropout), random.numbers((3, 7, 130), seed=-5, device=DEVICE)
    x = torch.ones(3, 7, 130, device=DEVICE, requires_grad=True)
    results = [kernel(x, 0.3, numbers.at(call)) for call in (0, 1, 1)]
    for call, result in zip((0, 1, 1), results, strict=True):
        torch.testing.assert_close(result, dropout(x, 0.3, numbers.at(call)))
    assert not torch.equal(results[0], results[1])
    compiled = torch.compile(lambda x: kernel(x, 0.3, numbers), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), results[0])
    # The backward draws the same numbers as the forward.
    (gradient,) = torch.autograd.grad(results[1].sum(), x)
    mask = random.uniform(numbers.at(1)) >= 0.3
    torch.testing.assert_close(gradient, mask / 0.7)
    assert 0.65 < mask.float().mean() < 0.75


def test_other_seeds_have_other_numbers() -> None:
    first, second = (random.uniform(random.numbers((40,), seed=seed)) for seed in (1, 1 << 33))
    assert not torch.equal(first, second)


def test_shapes_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"call is -1; it must be from 0 to 2\*\*31 - 1"):
        random.numbers((3,), seed=0).at(-1)
    with pytest.raises(ArgumentError, match="1 rows of 2147483648 elements"):
        random.numbers((2**31,), seed=0)


def truncated(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds stochastically to bfloat16: adds random bits, and then cuts off the lower half."""
    return (((x.view(torch.int32) + (bits & 0xFFFF)) >> 16) << 16).view(torch.float32)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(torch.int16) & 0xFF, (x.view(torch.int16) ^ 1).view(x.dtype)


def test_views_as_another_dtype_of_equal_width_equal_eager_mode() -> None:
    x = torch.randn(5, 70, device=DEVICE)
    bits = torch.randint(1 << 30, (5, 70), dtype=torch.int32, device=DEVICE)
    assert torch.equal(pointwise(truncated)(x, bits), truncated(x, bits))
    for dtype in (torch.float16, torch.bfloat16):
        actual, expected = pointwise(halves)(x.to(dtype)), halves(x.to(dtype))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def test_views_of_another_width_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match=r"aten\.view\.dtype"):
        pointwise(lambda x: x.view(torch.int16))(torch.randn(3, 4, device=DEVICE))
