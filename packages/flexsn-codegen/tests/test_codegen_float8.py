"""Float8 values in pointwise kernels have the same bits as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexsn_codegen import ArgumentError, UnsupportedOpError, pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(torch.float32) * scale


@pytest.fixture(params=["triton", "cpp"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the language of the kernels."""
    name: str = request.param
    if name == "cpp":
        if DEVICE == "cuda":
            pytest.skip("tensors on a GPU have no kernels in C++")
        request.getfixturevalue("compiler")
        from flexsn_codegen.targets.triton import device

        monkeypatch.setattr(device, "INTERPRETED", False)
    return name


def list_numbers(dtype: torch.dtype) -> Tensor:
    """Returns all numbers of a dtype, the midpoints of neighbours, and numbers beyond the range."""
    finite = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    beyond = torch.tensor([463.9, 464.0, 464.1, 480.0, 61439.0, 61440.0, 65536.0, 1e30])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([torch.randn(500, generator=generator) * 10.0**k for k in range(-7, 6)])
    return torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond, -beyond, drawn])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_bits_equal_eager_mode(dtype: torch.dtype, language: str) -> None:
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).to(DEVICE)
    unit = torch.ones((), device=DEVICE)
    torch.testing.assert_close(pointwise(scaled)(values, unit), values.float(), rtol=0, atol=0, equal_nan=True)
    x = list_numbers(dtype).to(DEVICE)
    actual = pointwise(lambda v: v.to(dtype))(x)
    assert actual.dtype == dtype
    expected = x.to(dtype).float()
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_gradients_pass_through_a_round_trip(dtype: torch.dtype) -> None:
    def round_trip(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).clamp(-448, 448).to(dtype).to(x.dtype) * scale

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 40, generator=generator).to(DEVICE).requires_grad_()
    scale = torch.rand(33, 1, generator=generator).to(DEVICE)
    actual, expected = pointwise(round_trip, autograd=True)(x, scale), round_trip(x, scale)
    assert torch.equal(actual, expected)
    cotangent = torch.rand_like(actual)
    ours, theirs = (torch.autograd.grad(r, x, cotangent)[0] for r in (actual, expected))
    torch.testing.assert_close(ours, theirs)


def test_refusals_name_the_alternatives() -> None:
    x = torch.zeros(8, dtype=torch.float8_e4m3fnuz, device=DEVICE)
    with pytest.raises(ArgumentError, match="kernels read float8_e4m3fn and float8_e5m2"):
        pointwise(scaled)(x, torch.ones((), device=DEVICE))
    with pytest.raises(UnsupportedOpError, match="does not view float8 as another dtype"):
        pointwise(lambda v: v.view(torch.uint8) + 1)(torch.zeros(8, dtype=torch.float8_e5m2, device=DEVICE))
