"""An elementwise function is one kernel, whose results and gradients equal those of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from flexsn_codegen import ArgumentError, AutogradError, DeviceError, TraceError, UnsupportedOpError, pointwise
from flexsn_codegen.functions._layout import plan_layout
from flexsn_codegen.targets.triton import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gated(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    return x * functional.silu(gate) * scale


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = max(1, torch.Size(shape).numel())
    values = torch.linspace(-3, 3, count) if shape else torch.tensor([1.25])
    return values.reshape(shape).to(dtype).to(DEVICE)


@pytest.mark.long(
    all_but=[
        "first3-second3-third3-dtype0",
        "first0-second0-third0-dtype1",
        "first4-second4-third4-dtype0",
        "first1-second1-third1-dtype3",
        "first2-second2-third2-dtype2",
    ]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [((7,), (7,), (7,)), ((2, 3, 5), (5,), ()), ((4, 1), (1, 6), ()), ((), (), ()), ((3, 1, 5), (1, 4, 1), (5,))],
)
def test_broadcasting_equals_eager(
    dtype: torch.dtype, first: tuple[int, ...], second: tuple[int, ...], third: tuple[int, ...]
) -> None:
    arguments = [draw(*shape, dtype=dtype) for shape in (first, second, third)]
    result = pointwise(gated)(*arguments)
    expected = gated(*arguments)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t[1:, :, 1:],
        lambda t: t.permute(1, 2, 0),
        lambda t: t[:, :1].expand(-1, 4, -1),
        lambda t: t.unfold(2, 2, 1),
    ],
)
def test_strided_arguments_equal_eager(view: Callable[[Tensor], Tensor]) -> None:
    x = view(torch.randn(4, 4, 4, device=DEVICE))
    y = torch.randn(x.shape, device=DEVICE)
    assert torch.equal(pointwise(torch.sub)(x, y), x - y)
    assert torch.equal(pointwise(torch.sub)(y, x), y - x)


def test_layout_equals_that_of_the_first_argument_without_a_copy() -> None:
    x = torch.randn(2, 3, 4, 5, device=DEVICE).to(memory_format=torch.channels_last)
    bias = torch.randn(3, 1, 1, device=DEVICE)
    result = pointwise(torch.add)(x, bias)
    assert result.stride() == x.stride()
    assert torch.equal(result, x + bias)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    shape, strides = plan_layout([x, bias, other])
    order = sorted(range(4), key=lambda d: -strides[d])
    layouts, numbers = TRITON.walk(
        [shape[d] for d in order], [[t.expand(shape).stride(d) for d in order] for t in (x, bias, other)]
    )
    assert layouts[:2] == (-1, 1)
    assert numbers[:3] == [1, 3, 1]


def test_several_programs_process_many_elements() -> None:
    x = torch.randn(200_003, device=DEVICE)
    assert torch.equal(pointwise(torch.neg)(x), -x)


def test_one_trace_serves_every_size() -> None:
    calls = 0

    def double_and_count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    kernel = pointwise(double_and_count)
    first_count = None
    for size in (1, 5, 64, 1000):
        x = torch.randn(size, device=DEVICE)
        assert torch.equal(kernel(x), x * 2)
        first_count = first_count or calls
    assert calls == first_count


def test_empty_tensors_need_no_kernel() -> None:
    result = pointwise(torch.exp)(torch.empty(0, 3, device=DEVICE))
    assert result.shape == (0, 3)


def test_results_may_have_different_dtypes() -> None:
    x = draw(9)
    spike, index, value = pointwise(lambda x: (x > 0, x.to(torch.int16), x.double()))(x)
    assert torch.equal(spike, x > 0)
    assert torch.equal(index, x.to(torch.int16))
    assert torch.equal(value, x.double())


def test_tensors_without_dimensions_promote_as_in_eager_mode() -> None:
    x, scale = draw(5, dtype=torch.bfloat16), torch.tensor(0.3, device=DEVICE)
    result = pointwise(torch.mul)(x, scale)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, x * scale)


def test_local_mutation_is_allowed() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        return y.clamp_(-1, 1).masked_fill_(y == 1, 7)

    x = draw(9)
    expected = torch.where(x >= 0.5, 7.0, (x * 2).clamp(min=-1))
    assert torch.equal(pointwise(function)(x), expected)


def test_graph_can_be_a_function() -> None:
    module = fx.symbolic_trace(lambda x, y: torch.relu(x) + y)
    x, y = draw(5), draw(5)
    result = pointwise(module.graph)(x, y)
    assert isinstance(result, Tensor)
    assert torch.equal(result, torch.relu(x) + y)


@pytest.mark.long(all_but=["dtype0", "dtype2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_equal_eager(dtype: torch.dtype) -> None:
    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [draw(4, 6, dtype=dtype), draw(6, dtype=dtype), draw(dtype=dtype)]
        for leaf in leaves:
            leaf.requires_grad_()
        result = function(*leaves)
        result.backward(torch.linspace(-1, 1, 24, device=DEVICE).reshape(4, 6).to(dtype))
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    actual, expected = gradients(pointwise(gated, autograd=True)), gradients(gated)
    assert len(actual) == 3
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5  # eager mode sums rounded terms, in another order
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def test_gradients_pass_gradcheck() -> None:
    x, w, s = (draw(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 2), (2,), ()))
    kernel = pointwise(lambda x, w, s: (torch.tanh(x * w) * s.exp(), x > w), autograd=True)
    assert torch.autograd.gradcheck(lambda *a: kernel(*a)[0], (x, w, s), fast_mode=False)


def test_gradients_pass_gradgradcheck() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * w) / (1 + x * x), (x > w).to(x)

    x, w = (draw(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 2), (2,)))
    kernel = pointwise(function, autograd=True)
    assert torch.autograd.gradgradcheck(lambda *a: kernel(*a)[0], (x, w))
    third = []
    for f in (kernel, function):
        result = f(x, w)[0].sum()
        for _ in range(3):
            (result,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        third.append(result)
    torch.testing.assert_close(*third)


def test_second_derivatives_by_one_argument_equal_eager_mode() -> None:
    x, y = draw(6, dtype=torch.float64).requires_grad_(), draw(6, dtype=torch.float64)

    def twice(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(x, y), x, torch.ones_like(x), create_graph=True)
        (second,) = torch.autograd.grad(first, x, y)
        return second

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x * y)

    torch.testing.assert_close(twice(pointwise(function, autograd=True)), twice(function))


@pytest.mark.long(all_but=["<lambda>0"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: torch.exp(x * s),
        lambda x, s: torch.sin(x) * (s * s) + s.exp() * x,
        lambda x, s: functional.softplus(x * s.tanh()) / (s * s + x * x),
    ],
)
def test_second_derivatives_by_an_argument_without_dimensions_equal_eager_mode(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x = draw(5, dtype=torch.float64).requires_grad_()
    s = torch.tensor(0.7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    kernel = pointwise(function, autograd=True)
    weights = torch.linspace(-1, 2, 5, dtype=torch.float64, device=DEVICE).requires_grad_()

    def second(f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        by_x, by_s = torch.autograd.grad(f(x, s), (x, s), weights, create_graph=True)
        return torch.autograd.grad((by_x * by_x).sum() + by_s * by_s, (x, s, weights))

    for actual, expected in zip(second(kernel), second(function), strict=True):
        torch.testing.assert_close(actual, expected)
    assert torch.autograd.gradgradcheck(kernel, (x, s))


def test_gradient_of_a_scalar_keeps_its_dtype_in_mixed_precision() -> None:
    x = draw(64, dtype=torch.bfloat16)
    actual, expected = (torch.tensor(0.5, device=DEVICE, requires_grad=True) for _ in range(2))
    pointwise(lambda x, s: torch.sigmoid(x * (s * 2)), autograd=True)(x, actual).sum().backward()
    torch.sigmoid(x * (expected * 2)).sum().backward()
    assert actual.grad is not None
    assert actual.grad.dtype == torch.float32
    torch.testing.assert_close(actual.grad, expected.grad, rtol=0.02, atol=0.02)


def test_only_the_sum_of_a_half_scalars_gradient_must_not_overflow() -> None:
    x = torch.tensor([1e6, -1e6, 3.0], device=DEVICE)
    s = torch.tensor(0.5, dtype=torch.float16, device=DEVICE, requires_grad=True)
    pointwise(torch.mul, autograd=True)(x, s).sum().backward()
    assert s.grad is not None
    assert s.grad.dtype == torch.float16
    assert s.grad.item() == 3.0


@pytest.mark.parametrize("function", [torch.logit, lambda x: torch.xlogy(x, 0.3), torch.tanh])
def test_functions_of_only_tensors_without_dimensions_have_gradients(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor(0.3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(pointwise(function, autograd=True), (x,))


def test_only_required_gradients_are_computed() -> None:
    x, y = draw(5).requires_grad_(), draw(5)
    pointwise(torch.mul, autograd=True)(x, y).sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), y)
    assert y.grad is None


def test_surrogate_gradients_equal_eager_mode() -> None:
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (x >= 0).to(x)

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return grad * torch.exp(-x.abs())

    x = draw(9).requires_grad_()
    result = pointwise(lambda x: Spike.apply(x), autograd=True, name="spike")(x)
    assert torch.equal(result, (x >= 0).to(x))
    result.sum().backward()
    torch.testing.assert_close(x.grad, torch.exp(-x.detach().abs()))


@pytest.mark.parametrize(
    "backward",
    [lambda grad: grad.clamp(-1, 1), lambda grad: grad * grad, lambda grad: grad.expand(5).tanh().sum()],
)
def test_gradient_of_a_sum_must_be_linear(backward: Callable[[Tensor], Tensor]) -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, s: Tensor) -> Tensor:
            return s * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return backward(grad)

    kernel = pointwise(lambda x, s: x * Odd.apply(s), autograd=True)
    with pytest.raises(UnsupportedOpError, match="without dimensions"):
        kernel(draw(5), torch.tensor(1.0, device=DEVICE, requires_grad=True)).sum().backward()


def test_gradient_of_a_kernel_without_autograd_is_refused() -> None:
    x = draw(3).requires_grad_()
    kernel = pointwise(torch.exp, autograd=False)
    with pytest.raises(AutogradError, match="autograd=False"):
        kernel(x)
    with torch.no_grad():
        assert torch.equal(kernel(x), torch.exp(x))


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda x: x.sum(), UnsupportedOpError, r"aten\.sum\.default reduces dimensions 0, 1 of 2"),
        (lambda x: x.softmax(0), UnsupportedOpError, r"aten\._softmax\.default reduces dimension 0 of 2"),
        (lambda x: x.flip(0) + x, UnsupportedOpError, r"aten\.flip\.default does not work element by element"),
        (lambda x: x + torch.rand_like(x), UnsupportedOpError, r"aten\.rand_like\.default: random"),
        (lambda x: functional.dropout(x), UnsupportedOpError, r"random ops (.|\n)*  at .*test_codegen_pointwise"),
        (lambda x: x * torch.complex(x, x), UnsupportedOpError, "complex"),
        (lambda x: x.t(), TraceError, "common shape"),
        (lambda x: x / x.shape[0], TraceError, "reads a shape"),
        (lambda x: x if x.mean() > 0 else -x, UnsupportedOpError, "torch.where"),
        (lambda x: x.data.relu_(), UnsupportedOpError, "in place"),
        (lambda x: 3, TraceError, "a value of type int"),
        (lambda x: None, TraceError, "a value of type NoneType"),
    ],
)
def test_functions_that_are_not_pointwise_are_refused(
    function: Callable[[Tensor], Tensor], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pointwise(function)(draw(3, 3))


def test_wrong_arguments_are_refused() -> None:
    kernel: Any = pointwise(torch.add)
    with pytest.raises(ArgumentError, match="argument 1 of add is a complex"):
        kernel(draw(3), 2j)
    with pytest.raises(ArgumentError, match="without tensors"):
        pointwise(lambda: torch.ones(3))()
    with pytest.raises(ArgumentError, match=r"\[3\], \[4\] do not broadcast"):
        kernel(draw(3), draw(4))
    with pytest.raises(ArgumentError, match="complex64"):
        kernel(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(DeviceError, match="on"):
        kernel(draw(3), torch.empty(3, device="meta"))
    assert issubclass(ArgumentError, TypeError)


@pytest.mark.skipif(DEVICE != "cpu", reason="the memory is a file with holes")
def test_offsets_may_exceed_two_to_the_31(tmp_path: Path) -> None:
    file = tmp_path / "holes"
    memory = torch.from_file(str(file), shared=True, size=3 * 2**30 + 1, dtype=torch.uint8)
    x = memory[:: 2**30]
    x.copy_(torch.tensor([1, 2, 3, 4]))
    assert torch.equal(pointwise(lambda x: x + 1)(x), torch.tensor([2, 3, 4, 5], dtype=torch.uint8))
    assert "off = tl.program_id(0).to(tl.int64) * BLOCK" in pointwise(torch.neg).source(x).source
