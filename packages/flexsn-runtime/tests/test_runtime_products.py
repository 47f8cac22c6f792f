"""Products with spikes split weights into parts, and are nearly exact. Other inputs are multiplied in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime import spike_linear
from flexsn_runtime.errors import DeviceError, DtypeError, ShapeError
from flexsn_runtime.products import _linear

# (rows, features, outputs) with whole tiles, partial tiles, a single element, and several tiles whose sums are divided.
SHAPES = [(64, 64, 32), (70, 45, 33), (1, 1, 1), (300, 20, 40)]
LARGE = [(8192, 1024, 1024), (4097, 700, 523), (1000, 2048, 20), (64000, 512, 512)]
# Errors relative to the root mean square, by number of parts. The interpreter has no bfloat16, and truncates values.
ERRORS = {3: 2e-7, 2: 3e-5, 1: 8e-3}


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_operands(shape: tuple[int, int, int], device: str = "cpu", rate: float = 0.3) -> Four:
    rows, features, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    s = (torch.rand(rows, features, generator=generator) < rate).float()
    weight, bias = torch.randn(outputs, features, generator=generator), torch.randn(outputs, generator=generator)
    grad = torch.randn(rows, outputs, generator=generator) * torch.rand(rows, outputs, generator=generator).pow(6)
    return s.to(device), weight.to(device), bias.to(device), grad.to(device)


def compute_results(
    s: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, parts: int
) -> tuple[list[Tensor], Tensor | None]:
    leaves = s.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    y, record = spike_linear(*leaves, parts, parts)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)], record


def compute_expected(s: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    s, weight, bias, grad = (t.double() for t in (s, weight, bias, grad))
    return [s @ weight.t() + bias, grad @ weight, grad.t() @ s, grad.sum(0)]


def measure_error(actual: Tensor, expected: Tensor) -> float:
    scale = expected.square().mean().sqrt().clamp_min(1e-3)
    return float((actual.double() - expected).square().mean().sqrt() / scale)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("parts", [3, 2, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long(all_but=["shape1-3", "shape1-2", "shape3-1"])
def test_product_is_as_exact_as_its_parts(shape: tuple[int, int, int], parts: int) -> None:
    tensors = draw_operands(shape)
    actual, record = compute_results(*tensors, parts)
    assert record is not None
    assert not record.any()
    assert [measure_error(f, w) < ERRORS[parts] for f, w in zip(actual, compute_expected(*tensors), strict=True)] == [
        True
    ] * 4


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("value", [0.3, -1.1, 257.0, 1e30, 1 + 2**-20])
@pytest.mark.long(all_but=["0.3"])
def test_other_numbers_than_spikes_are_multiplied_in_float32(value: float) -> None:
    s, weight, bias, grad = draw_operands((70, 45, 33))
    s[37, 44] = value
    actual, record = compute_results(s, weight, bias, grad, 2)
    assert record is not None
    assert record.nonzero().flatten().tolist() == [37 // 16]
    expected = compute_expected(s, weight, bias, grad)
    is_near = torch.ones(70, dtype=torch.bool)
    is_near[32:48] = False
    torch.testing.assert_close(
        actual[0][~is_near].double(), expected[0][~is_near], rtol=2e-6, atol=2e-6 * max(1, abs(value))
    )
    assert measure_error(actual[0][is_near], expected[0][is_near]) < ERRORS[2]  # other rows have the error of two parts
    assert measure_error(actual[2], expected[2]) < 1e-6  # the weight's gradient


@pytest.mark.usefixtures("interpreted")
def test_integers_of_eight_bits_are_exact_operands() -> None:
    s, weight, bias, grad = draw_operands((70, 45, 33))
    s = torch.randint(-256, 257, s.shape).float()
    actual, record = compute_results(s, weight, bias, grad, 3)
    assert record is not None
    assert not record.any()
    assert measure_error(actual[0], compute_expected(s, weight, bias, grad)[0]) < ERRORS[3]


@pytest.mark.usefixtures("interpreted")
def test_large_small_and_infinite_numbers_are_multiplied() -> None:
    s = torch.eye(6)
    weight = torch.tensor([[3.4028e38, -3.4028e38, 1e-30, 0.0, torch.inf, torch.nan]])
    y, _ = spike_linear(s[:4], weight[:, :6].nan_to_num(0, 0, 0), None)
    torch.testing.assert_close(y[:, 0], weight[0, :4], rtol=1e-7, atol=0)
    y, _ = spike_linear(s, weight, None)
    assert not y.isfinite().any()  # as in torch's product, since a weight is infinite


@pytest.mark.usefixtures("interpreted")
def test_sums_on_a_grid_are_equal_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    s = (torch.rand(150, 100, generator=generator) < 0.5).float()
    weight = torch.randint(-(2**15) + 1, 2**15, (40, 100), generator=generator).float() * 2.0**-9
    expected = (s.double() @ weight.double().t()).float()
    for parts in (2, 3):
        y, _ = spike_linear(s, weight, None, parts, parts)
        assert torch.equal(y, expected)


@pytest.mark.usefixtures("interpreted")
def test_views_equal_torchs_product() -> None:
    s, weight, bias, _ = draw_operands((60, 45, 33))
    base = F.linear(s, weight, bias)
    wide = torch.zeros(60, 90)
    wide[:, ::2] = s  # holes between the elements
    rows = torch.zeros(60, 50)
    rows[:, 2:47] = s  # holes between the rows
    for view in (wide[:, ::2], rows[:, 2:47], s.t().contiguous().t()):
        torch.testing.assert_close(spike_linear(view, weight, bias)[0], base)
    torch.testing.assert_close(spike_linear(s, weight.t().contiguous().t(), bias)[0], base)
    for shape in ((3, 20, 45), (3, 4, 5, 45)):
        torch.testing.assert_close(spike_linear(s.view(shape), weight, bias)[0], base.view(*shape[:-1], 33))
    torch.testing.assert_close(spike_linear(s[7], weight, bias)[0], base[7])
    assert spike_linear(s[:0], weight, bias)[0].shape == (0, 33)


@pytest.mark.usefixtures("interpreted")
def test_expanded_and_unneeded_gradients_are_handled() -> None:
    s, weight, bias, _ = draw_operands((60, 45, 33))
    weight.requires_grad_()
    y, _ = spike_linear(s, weight, bias)
    (gradient,) = torch.autograd.grad(y.sum(), [weight])
    torch.testing.assert_close(gradient, s.sum(0).expand(33, -1), rtol=1e-5, atol=1e-5)
    y, _ = spike_linear(s.requires_grad_(), weight.detach(), None)
    (gradient,) = torch.autograd.grad(y.sum(), [s])
    torch.testing.assert_close(gradient, weight.detach().sum(0).expand(60, -1), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
def test_second_derivatives_and_transforms_equal_torchs() -> None:
    s, weight, bias, _ = draw_operands((10, 12, 7))
    s.requires_grad_()
    weight.requires_grad_()

    def penalty(linear: object) -> list[Tensor]:
        assert callable(linear)
        y = linear(s, weight, bias).square()
        (of_s,) = torch.autograd.grad(y.sum(), [s], create_graph=True)
        return list(torch.autograd.grad(of_s.square().sum(), [s, weight]))

    actual = penalty(lambda *arguments: spike_linear(*arguments)[0])
    torch.testing.assert_close(actual, penalty(F.linear), rtol=1e-5, atol=1e-3)
    rows = torch.func.vmap(lambda row: spike_linear(row, weight, bias)[0])(s)
    torch.testing.assert_close(rows, F.linear(s, weight, bias))
    gradient = torch.func.grad(lambda w: spike_linear(s, w, bias)[0].sum())(weight)
    torch.testing.assert_close(gradient, s.sum(0).expand(7, -1))


@pytest.mark.usefixtures("interpreted")
def test_several_gradients_are_computed_at_once() -> None:
    s, weight, bias, _ = draw_operands((10, 12, 7))
    weight.requires_grad_()
    y, _ = spike_linear(s, weight, bias)
    grads = torch.randn(3, 10, 7)
    (gradients,) = torch.autograd.grad(y, [weight], grads, is_grads_batched=True)
    torch.testing.assert_close(gradients, grads.transpose(1, 2) @ s)


# opcheck reads gradients of tensors that are not leaves.
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@OPCHECK
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("with_bias", [True, False])
def test_operators_pass_opcheck(with_bias: bool) -> None:
    s, weight, bias, grad = draw_operands((40, 12, 7))
    leaf, learned = s.view(4, 10, 12).clone().requires_grad_(), weight.requires_grad_()
    added = bias.requires_grad_() if with_bias else None
    torch.library.opcheck(_linear.spike_linear_op, (leaf, learned, added, 3, 2))
    record = torch.zeros(5, dtype=torch.int32)
    arguments = (grad, s.detach(), weight.detach(), record, 2, 3, [True, False, with_bias])
    torch.library.opcheck(_linear.spike_linear_backward_op, arguments)


@pytest.mark.usefixtures("interpreted")
def test_compiled_graph_has_the_bits_of_eager_mode() -> None:
    tensors = draw_operands((40, 12, 7))
    leaves, grad = [t.requires_grad_() for t in tensors[:3]], tensors[3]
    compiled = torch.compile(lambda *x: spike_linear(*x)[0] * 2, backend="aot_eager", fullgraph=True)
    y = compiled(*leaves)
    eager = spike_linear(leaves[0], leaves[1], leaves[2])[0] * 2
    assert torch.equal(y, eager)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(eager, leaves, grad), strict=True
    ):
        assert torch.equal(ours, theirs)


@OPCHECK
def test_product_of_torch_runs_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "why_unavailable", lambda device: "absent")
    s, weight, bias, grad = draw_operands((40, 12, 7))
    actual, record = compute_results(s, weight, bias, grad, 3)
    assert record is None
    assert torch.equal(actual[0], F.linear(s, weight, bias))
    torch.library.opcheck(_linear.spike_linear_op, (s, weight.requires_grad_(), bias, 3, 3))


def test_mismatches_are_refused() -> None:
    s, weight, bias, _ = draw_operands((40, 12, 7))
    with pytest.raises(DtypeError, match=r"weight is torch\.float64"):
        spike_linear(s, weight.double(), bias)
    with pytest.raises(ShapeError, match=r"\[40, 12\] and weight \[12, 7\]"):
        spike_linear(s, weight.t(), bias)
    with pytest.raises(ShapeError, match=r"bias is \[40\]"):
        spike_linear(s, weight, s[:, 0])
    with pytest.raises(DeviceError, match="weight on meta"):
        spike_linear(s, weight.to("meta"), bias)
    with pytest.raises(ValueError, match="4 parts"):
        spike_linear(s, weight, bias, 4, 1)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("shape", LARGE)
def test_three_parts_are_no_less_exact_than_torch(shape: tuple[int, int, int], rate: float) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    tensors = draw_operands(shape, "cuda", rate)
    actual, record = compute_results(*tensors, 3)
    assert record is not None
    assert not record.any()
    s, weight, bias, grad = tensors
    theirs = [F.linear(s, weight, bias), grad @ weight, grad.t() @ s]
    expected = compute_expected(*tensors)
    ours = [measure_error(f, w) for f, w in zip(actual, expected, strict=False)]
    base = [measure_error(f, w) for f, w in zip(theirs, expected, strict=False)]
    assert all(a <= max(1.2 * b, 2e-7) for a, b in zip(ours[:3], base, strict=True)), (ours, base)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE)
def test_two_parts_have_sixteen_bits(shape: tuple[int, int, int]) -> None:
    tensors = draw_operands(shape, "cuda")
    actual, _ = compute_results(*tensors, 2)
    errors = [measure_error(f, w) for f, w in zip(actual, compute_expected(*tensors), strict=True)]
    assert max(errors) < 1.2e-5, errors


@pytest.mark.gpu
def test_other_numbers_than_spikes_are_multiplied_in_float32_on_a_gpu() -> None:
    s, weight, bias, grad = draw_operands((4097, 700, 523), "cuda")
    s[1000, 699] = 0.3
    s[4096, 0] = -1e20
    actual, record = compute_results(s, weight, bias, grad, 3)
    assert record is not None
    assert record.nonzero().flatten().tolist() == [1000 // 16, 4096 // 16]
    expected = compute_expected(s, weight, bias, grad)
    assert measure_error(actual[0], expected[0]) < 3e-7
    assert measure_error(actual[2], expected[2]) < 1e-6


@pytest.mark.gpu
def test_sums_on_a_grid_are_equal_in_any_order_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    s = (torch.rand(10000, 500, device="cuda", generator=generator) < 0.5).float()
    weight = torch.randint(-(2**15) + 1, 2**15, (400, 500), device="cuda", generator=generator).float() * 2.0**-9
    expected = (s.double() @ weight.double().t()).float()
    for parts in (2, 3):
        assert torch.equal(spike_linear(s, weight, None, parts, parts)[0], expected)
    # Odd numbers whose sums need all 24 bits of float32 after the first hundred terms.
    large = 32767.0 - 2 * torch.randint(0, 3, weight.shape, device="cuda", generator=generator)
    ones = torch.ones_like(s)
    for parts in (2, 3):
        actual = spike_linear(ones, large, None, parts, parts)[0]
        assert torch.equal(actual, (ones.double() @ large.double().t()).float())
    assert torch.equal(torch.cat([spike_linear(part, weight, None)[0] for part in s.split(999)]), expected)


# Autograd's nodes of leaves belong to another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.gpu
def test_compiled_and_captured_products_have_the_bits_of_eager_mode() -> None:
    tensors = draw_operands((4097, 700, 523), "cuda")
    leaves, grad = [t.requires_grad_() for t in tensors[:3]], tensors[3]

    def training(run: object) -> list[Tensor]:
        assert callable(run)
        y = run(*leaves)
        # The gradients of a retained graph would be on the stream where the graph was created.
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    eager = training(lambda *x: spike_linear(*x)[0])
    compiled = training(torch.compile(lambda *x: spike_linear(*x)[0], fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(eager[:3], compiled[:3], strict=True))
    torch.testing.assert_close(eager[3], compiled[3])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training(lambda *x: spike_linear(*x)[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training(lambda *x: spike_linear(*x)[0])
    with torch.no_grad():
        leaves[1].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    expected = training(lambda *x: spike_linear(*x)[0])
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
