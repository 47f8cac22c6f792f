"""C++ kernels of pointwise functions are exact for operands and results of all layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flexsn_codegen import pointwise
from flexsn_codegen.targets.cpp import CPP, why_no_compiler

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up kernels in C++, as in a process without TRITON_INTERPRET."""
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, x * y, x) + y


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


CASES = {
    "bias": (draw(129, 70), draw(70)),
    "per row": (draw(129, 70), draw(129, 1)),
    "channel": (draw(3, 5, 17, 19), draw(5, 1, 1)),
    "channels last": (draw(3, 5, 17, 19).to(memory_format=torch.channels_last), draw(5, 1, 1)),
    "three colours": (draw(2003, 3), draw(3)),
    "one value for three columns": (draw(2003, 3), draw(2003, 1)),
    "short rows": (draw(301, 7, 5), draw(7, 1)),
    "transposed": (draw(65, 90), draw(90, 65).t()),
    "pages, transposed": (draw(3, 33, 90), draw(3, 90, 33).transpose(1, 2)),
    "four dimensions, channels last": (draw(2, 67, 3, 70), draw(2, 3, 70, 67).permute(0, 3, 1, 2)),
    "every second element": (draw(65, 180)[:, ::2], draw(130, 90)[::2]),
    "outer": (draw(70, 1), draw(1, 90)),
    "four dimensions in another order": (draw(3, 20, 5, 33), draw(33, 5, 20, 3).permute(3, 2, 1, 0)),
    "one element": (draw(1, 1), draw(1)),
    "empty": (draw(0, 5), draw(5)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_strides(name: str) -> None:
    x, y = CASES[name]
    expected = function(x, y)
    kernel = pointwise(function)
    result = kernel(x, y)
    assert torch.equal(result, expected)
    if result.numel():
        out = torch.full([2 * n for n in result.shape], 7.0)
        place = out[tuple(slice(None, None, 2) for _ in result.shape)]
        kernel.into(place, x, y)
        assert torch.equal(place, expected)
        assert (out == 7.0).sum() == out.numel() - place.numel()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float64])
def test_tiles_of_operands_and_results_are_transposed(dtype: torch.dtype) -> None:
    numbers = torch.arange(147 * 90, dtype=dtype)
    x, y, out = numbers.view(147, 90), numbers.view(90, 147).t(), torch.zeros(90, 147, dtype=dtype)
    kernel = pointwise(torch.sub)
    assert "dev::transpose(" in kernel.source(x, y, target=CPP).source
    assert torch.equal(kernel.into(out.t(), x, x), x - x)
    assert torch.equal(kernel.into(out.t(), x, y), x - y)


def test_innermost_loop_is_over_consecutive_elements() -> None:
    source = pointwise(function).source(draw(129, 70), draw(129, 1), target=CPP).source
    assert "dev::load(input_0_at[lane])" in source
    assert "const auto input_1 = dev::load(input_1_at[0]);" in source
    assert "offset_of" not in source


FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan, 1e-45, -3.4e38, 1.2e-38, 65519.9, 65520.0]
)


def test_remainders_are_exact_for_all_floats() -> None:
    bits = torch.randint(-(2**31), 2**31, (2, 20_000), generator=torch.Generator().manual_seed(0))
    random = bits.to(torch.int32).view(torch.float32)
    pairs = torch.cartesian_prod(FLOATS, FLOATS)
    x, y = torch.cat([random[0], pairs[:, 0]]), torch.cat([random[1], pairs[:, 1]])
    actual = pointwise(torch.fmod)(x, y)
    # Python's fmod is exact in float64. For float32 numbers, its result is a float32 number.
    expected = torch.tensor([_fmod(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])
    assert torch.equal(actual.nan_to_num(5.5), expected.nan_to_num(5.5))
    assert torch.equal(actual.signbit()[~actual.isnan()], expected.signbit()[~actual.isnan()])


def _fmod(x: float, y: float) -> float:
    try:
        return math.fmod(x, y)
    except ValueError:
        return math.nan


def test_angles_are_within_one_ulp() -> None:
    pairs = torch.cartesian_prod(FLOATS, FLOATS)
    y, x = torch.cat([draw(2, 50_000), pairs.t()], 1)
    actual = pointwise(torch.atan2)(y, x)
    expected = torch.atan2(y.double(), x.double()).float()
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (actual.view(torch.int32).long() - expected.view(torch.int32).long()).abs()
    assert distance[~expected.isnan()].max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_are_rounded_as_in_eager_mode(dtype: torch.dtype) -> None:
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    near = torch.cat([values.float() * (1 + k * 2**-12) for k in range(9)] + [FLOATS])
    for actual, expected in (
        (pointwise(lambda x: x.to(dtype))(near), near.to(dtype)),
        (pointwise(lambda x: torch.relu(x * 1.37 + 0.1) * 0.9)(values), torch.relu(values * 1.37 + 0.1) * 0.9),
    ):
        a, b = actual.float(), expected.float()
        assert torch.equal(a.nan_to_num(5.5, 1e6, -1e6), b.nan_to_num(5.5, 1e6, -1e6))
        assert torch.equal(a.signbit()[~b.isnan()], b.signbit()[~b.isnan()])
        assert torch.equal(a.isnan(), b.isnan())
