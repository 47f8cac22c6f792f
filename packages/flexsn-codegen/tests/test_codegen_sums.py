"""Kernels sum gradients of arguments that broadcast, for operands and results in any memory order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import KernelSource, OfflineJob, compile_offline, pointwise
from flexsn_codegen.functions._plan import NewMemory, Plan, PlannedLaunch
from flexsn_codegen.targets.triton import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark: list[pytest.MarkDecorator] = [] if DEVICE == "cpu" else [pytest.mark.gpu]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x * weight + bias)


def distance(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-((x - y) ** 2))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def colours(x: Tensor) -> Tensor:
    r, g, b = x.unbind(-1)
    return torch.stack([r * 2, g + r, b * g], -1)


def four(x: Tensor, y: Tensor) -> Tensor:
    a, b, c, d = x.unbind(-1)
    return torch.stack([a * y, b + a, c, d - y], -1)


Case = tuple[Callable[..., Tensor], list[Tensor]]
CASES: dict[str, Callable[[], Case]] = {
    "a bias of columns": lambda: (scaled, [draw(70, 40), draw(40)]),
    "a scale of rows": lambda: (scaled, [draw(70, 40), draw(70, 1)]),
    "channels first": lambda: (affine, [draw(3, 5, 6, 7), draw(5, 1, 1), draw(5, 1, 1)]),
    "channels last": lambda: (affine, [draw(3, 5, 6, 20), draw(20), draw(20)]),
    "channels last in memory": lambda: (
        affine,
        [draw(3, 20, 6, 7).contiguous(memory_format=torch.channels_last), draw(20, 1, 1), draw(20, 1, 1)],
    ),
    "rows and columns": lambda: (distance, [draw(70, 1), draw(1, 90)]),
    "several": lambda: (
        lambda x, a, b, c: x * a * b + c,
        [draw(9, 20, 30), draw(9, 1, 1), draw(20, 30), draw(20, 1)],
    ),
    "columns in another order": lambda: (scaled, [draw(4, 20, 30).permute(2, 0, 1), draw(4, 20)]),
    "more columns than a program processes": lambda: (scaled, [draw(5, 3000), draw(3000)]),
    "few columns": lambda: (scaled, [draw(50, 3), draw(3)]),
    "one number": lambda: (scaled, [draw(50, 30), draw()]),
    "no rows": lambda: (scaled, [draw(0, 30), draw(30)]),
    "no columns": lambda: (scaled, [draw(30, 0), draw(30, 1)]),
    "sizes of one": lambda: (scaled, [draw(1, 30, 1), draw(30, 1)]),
    "transposed": lambda: (lambda x, y: x * y, [draw(70, 45), draw(45, 70).t()]),
    "transposed, and a bias": lambda: (lambda x, y, b: x * y * b, [draw(33, 45), draw(45, 33).t(), draw(33, 1)]),
    "transposed pages": lambda: (lambda x, y: x * y, [draw(3, 33, 45), draw(3, 45, 33).transpose(1, 2)]),
    "unchanged gradients": lambda: (lambda x, y: x % y + x - x, [draw(50, 30), draw(50, 30)]),
    "an unchanged and a summed gradient": lambda: (lambda x, y: x + y, [draw(50, 30), draw(30)]),
    "alike": lambda: (lambda x, y: (x + y) * 2, [draw(50, 30), draw(50, 30)]),
    "equal gradients, one of them summed": lambda: (lambda x, y: (x + y) * 2, [draw(50, 30), draw(30)]),
    "a norm": lambda: (layer_norm, [draw(150, 70), draw(70), draw(70)]),
    "a softmax": lambda: (lambda x, y: torch.softmax(x / y, -1) * y.exp(), [draw(150, 70), draw(70)]),
    "pieces": lambda: (rotary, [draw(3, 2, 20, 64), draw(20, 32), draw(20, 32)]),
    "interleaved pairs": lambda: (rotary_pairs, [draw(3, 2, 20, 64), draw(20, 32), draw(20, 32)]),
    "interleaved colours": lambda: (colours, [draw(5, 20, 30, 3)]),
    "four interleaved columns": lambda: (four, [draw(500, 4), draw(500)]),
    "colours to gray": lambda: (lambda x: 0.3 * x[..., 0] + 0.6 * x[..., 1] * x[..., 2], [draw(5, 20, 30, 3)]),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of elements of each launch."""
    sizes: list[int] = []
    run = PlannedLaunch.run

    def record_size(launch: PlannedLaunch, *arguments: Any) -> None:
        sizes.append(launch.numel)
        run(launch, *arguments)

    monkeypatch.setattr(PlannedLaunch, "run", record_size)
    return sizes


def compare(function: Callable[..., Tensor], arguments: list[Tensor], rtol: float = 1e-7, atol: float = 1e-7) -> None:
    ours, theirs = ([a.detach().requires_grad_() for a in arguments] for _ in range(2))
    actual, expected = pointwise(function, autograd=True)(*ours), function(*theirs)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype, device=DEVICE).reshape(expected.shape)
    gradients = [torch.autograd.grad(r, side, cotangent) for r, side in ((actual, ours), (expected, theirs))]
    for a, e in zip(*gradients, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


@pytest.mark.long(all_but=["a bias of columns", "rows and columns", "columns in another order", "interleaved colours"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_eager(name: str) -> None:
    compare(*CASES[name]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, weight = draw(2000, 64, dtype=dtype), draw(64, dtype=dtype).requires_grad_()
    (actual,) = torch.autograd.grad(pointwise(scaled)(x, weight).sum(), weight)
    torch.testing.assert_close(actual, x.double().sum(0).to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["rows and columns", "channels first", "a norm", "a softmax"])
def test_kernels_in_cpp_equal_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    if DEVICE == "cuda":
        pytest.skip("compares kernels on the CPU")
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)
    compare(*CASES[name]())


@pytest.mark.parametrize("function", [scaled, lambda x, weight: torch.tanh(x + weight)], ids=["apart", "alike"])
def test_gradients_need_no_memory_for_all_terms(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    shapes: list[tuple[int, ...]] = []
    allocate = NewMemory.on

    def record_shape(memory: NewMemory, like: Tensor) -> Tensor:
        shapes.append(memory.shape)
        return allocate(memory, like)

    monkeypatch.setattr(NewMemory, "on", record_shape)
    x, weight = draw(6000, 40).requires_grad_(), draw(40).requires_grad_()
    result = pointwise(function)(x, weight)
    shapes.clear()
    launches.clear()
    actual = torch.autograd.grad(result.sum(), (x, weight))
    torch.testing.assert_close(actual, torch.autograd.grad(function(x, weight).sum(), (x, weight)))
    assert len(launches) == 1
    assert sorted(map(math.prod, shapes))[:-1] < [6000 * 40 // 20]
    assert len(shapes) == 2


def test_incoming_gradient_is_returned_and_not_shared() -> None:
    kernel = pointwise(lambda x, y: x + y, autograd=True)
    x, y, cotangent = draw(20, 30).requires_grad_(), draw(20, 30).requires_grad_(), draw(20, 30)
    actual = torch.autograd.grad(kernel(x, y), (x, y), cotangent)
    assert all(gradient.data_ptr() == cotangent.data_ptr() for gradient in actual)
    for _ in range(2):
        # Autograd adds to a gradient in place if it holds the only reference.
        (kernel(x, y) * 1.0).backward(cotangent)
    assert torch.equal(torch.as_tensor(x.grad), 2 * cotangent)
    assert torch.equal(torch.as_tensor(y.grad), 2 * cotangent)
    assert torch.as_tensor(x.grad).data_ptr() != torch.as_tensor(y.grad).data_ptr()


def test_second_and_batched_gradients_are_right() -> None:
    x, weight = draw(2, 16).requires_grad_(), draw(16).requires_grad_()
    kernel: Any = pointwise(lambda x, w: torch.sin(x) * w * w, autograd=True)
    assert torch.autograd.gradgradcheck(kernel, (x, weight))
    cotangents = draw(3, 2, 16)
    batched = torch.vmap(lambda g: torch.autograd.grad(kernel(x, weight), (x, weight), g))(cotangents)
    for i in range(3):
        expected = torch.autograd.grad(kernel(x, weight), (x, weight), cotangents[i])
        for a, e in zip(batched, expected, strict=True):
            torch.testing.assert_close(a[i], e)


def generate_gradient_kernel(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> KernelSource:
    """Returns the kernel of the gradient in float32, in Triton."""
    kernels: list[KernelSource] = []
    run = Plan.run

    def record_kernels(plan: Plan, *arguments: Any) -> list[Tensor]:
        kernels.extend(launch.built.source for launch in plan.launches)
        return run(plan, *arguments)

    arguments = [draw(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
    result = pointwise(function)(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "run", record_kernels)
        torch.autograd.grad(result, arguments, torch.ones_like(result))
    (kernel,) = kernels
    return kernel


def test_pairs_are_read_and_written_together() -> None:
    kernel = generate_gradient_kernel(rotary_pairs, (3, 2, 20, 64), (20, 32), (20, 32))
    assert kernel.source.count("dev.load_pair(") == 2
    assert kernel.source.count("dev.store_pair(") == 1


def test_operands_with_equal_layouts_share_their_offsets() -> None:
    kernel = pointwise(affine).source(
        torch.empty(8, 20, 20, 3, device="meta"), *(torch.empty(3, device="meta") for _ in range(2)), target=TRITON
    )
    assert len([size for size in kernel.sizes if size.startswith("input_")]) == 3
    rotated = generate_gradient_kernel(rotary, (3, 2, 20, 64), (20, 32), (20, 32))
    assert len([size for size in rotated.sizes if "_column_size" in size]) == 2


def test_sources_read_and_write_in_the_order_of_memory() -> None:
    woven = pointwise(colours).source(torch.empty(50, 40, 3, device="meta"), target=TRITON)
    assert "tl.where(cell == 0" in woven.source
    x, y = torch.empty(4096, 1024, device="meta"), torch.empty(1024, 4096, device="meta").t()
    turned = pointwise(torch.add).source(x, y, target=TRITON)
    assert "column < width" in turned.source
    for use in compile_offline([OfflineJob(woven, "sm_90"), OfflineJob(turned, "sm_90", block=2048)]):
        assert use.spilled_bytes == 0


@pytest.mark.parametrize("exponent", [4, 5.0, 12, -3, -6])
def test_integer_powers_are_rounded_correctly(exponent: float) -> None:
    x = torch.cat(
        [draw(400, dtype=torch.float32).cpu() * 3, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30])]
    )
    expected = (x.double() ** exponent).to(torch.float32)
    torch.testing.assert_close(
        pointwise(lambda v: v**exponent)(x.to(DEVICE)).cpu(), expected, rtol=0, atol=0, equal_nan=True
    )
