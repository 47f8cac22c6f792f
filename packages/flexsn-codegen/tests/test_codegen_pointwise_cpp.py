"""C++ kernels of elementwise functions on CPU tensors equal eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import DeviceError, pointwise
from flexsn_codegen.targets.cpp import CPP, _compiler


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    """Sets up kernels in C++, as in a process without TRITON_INTERPRET."""
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)


def gated(x: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x * functional.silu(gate) * scale, x > gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_equal_eager(dtype: torch.dtype) -> None:
    def run(function: object) -> list[Tensor]:
        torch.manual_seed(0)
        # The tensors have several blocks and a partial block. One is strided, one broadcasts, one has no dimensions.
        x = torch.randn(301, 37, dtype=dtype).t().requires_grad_()
        gate, scale = torch.randn(301, dtype=dtype).requires_grad_(), torch.tensor(0.7, dtype=dtype).requires_grad_()
        result, mask = function(x, gate, scale)  # type: ignore[operator]
        result.backward(torch.linspace(-1, 1, result.numel()).to(dtype).reshape(result.shape))
        return [result, mask, *(torch.as_tensor(t.grad) for t in (x, gate, scale))]

    actual, expected = run(pointwise(gated, autograd=True)), run(gated)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5  # eager mode sums rounded terms, in another order
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
    assert torch.equal(actual[1], expected[1])


def test_source_exists_for_both_targets() -> None:
    x = torch.zeros(3)
    assert "@triton.jit" in pointwise(torch.neg).source(x).source
    assert "template <int64_t BLOCK" in pointwise(torch.neg).source(x, target=CPP).source


def test_error_without_a_compiler_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiler, "_find_compiler", lambda: None)
    with pytest.raises(DeviceError, match=r"there is no C\+\+ compiler (.|\n)*TRITON_INTERPRET=1"):
        pointwise(torch.neg)(torch.zeros(3))


def test_device_without_a_target_is_named() -> None:
    with pytest.raises(DeviceError, match="arguments of neg are on meta"):
        pointwise(torch.neg)(torch.zeros(3, device="meta"))


def rounded_often(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    z = torch.where(x <= y, -x / (y + 1.5), x * scale)
    return torch.relu(z * y + 0.25) - z, torch.where(x == y, 1.0, z * 3)


@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_chains_of_float16_have_the_bits_of_eager_mode(other: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16)  # all float16 numbers, including NaN
    shuffled = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))].to(other)
    kernel = pointwise(rounded_often)
    arguments = [(numbers, shuffled), (numbers[5:], shuffled[:-5])]
    # The row length is not a multiple of a vector. Operands have one value per row, one row for all
    # rows, or a transposed layout.
    rows = numbers[: 1927 * 34].view(34, 1927)
    arguments += [
        (rows, shuffled[:34, None]),
        (rows, shuffled[:1927]),
        (rows, shuffled[: 1927 * 34].view(1927, 34).t()),
    ]
    for x, y in arguments:
        for actual, expected in zip(kernel(x, y, 0.3), rounded_often(x, y, 0.3), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert "dev::load_floats(" in kernel.source(numbers, shuffled, 0.3, target=CPP).source


def test_values_of_a_half_dtype_are_rounded_once() -> None:
    # The source rounds the product explicitly, and the store rounds the sum. The result of `relu` needs no rounding.
    source = pointwise(lambda x: torch.relu(x * 3) + 1).source(torch.ones(5, dtype=torch.float16), target=CPP).source
    assert source.count("dev::round_float16(") == 1
