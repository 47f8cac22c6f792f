"""Kernels for pooling have the values, gradients, ties and formats of torch, also as operators and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flexsn_runtime import Window, average_pool, max_pool, why_no_kernel

FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
WINDOWS = {
    "3/2": Window((3, 3), (2, 2), (1, 1)),
    "2/2": Window((2, 2), (2, 2)),
    "dilated": Window((3, 2), (2, 3), (1, 0), (2, 1), ceil=True),
    "gaps": Window((2, 2), (3, 3), (1, 1), ceil=True),
    "overlapping": Window((5, 4), (1, 2), (2, 2), (1, 2)),
    "wide": Window((3, 3), (1, 1), (1, 1), (3, 2)),
    "of a row": Window((1, 3), (1, 2), (0, 1)),
    "ceil": Window((3, 3), (2, 2), (0, 1), ceil=True),
}
UNDILATED = ["3/2", "2/2", "gaps", "of a row", "ceil"]
SHAPE = (3, 5, 11, 13)
# The other checks cause warnings themselves; `test_compiled_graphs_equal_eager_mode` covers them.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def draw_spikes(shape: tuple[int, ...] = SHAPE, rate: float = 0.2) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < rate).float()


def pool_by_torch(x: Tensor, window: Window) -> Tensor:
    return F.max_pool2d(x, window.size, window.stride, window.padding, window.dilation, window.ceil)


def check_maximum(x: Tensor, window: Window) -> None:
    """Compares values with torch, and gradients with gradients in float64 that are rounded once."""
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = max_pool(ours, window), pool_by_torch(exact, window)
    theirs = pool_by_torch(x, window)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), theirs.nan_to_num())
    assert y.stride() == theirs.stride()
    assert torch.equal(y.detach().nan_to_num(), max_pool(x, window).nan_to_num())
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    (of_ours,), (of_exact,) = torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, exact, grad.double())
    assert of_ours.stride() == ours.stride()
    assert torch.equal(of_ours == 0, of_exact == 0)  # for equal maxima, the gradient is at the same position
    torch.testing.assert_close(of_ours, of_exact.to(x.dtype))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.long(all_but=["*-float32", "3/2-*-bfloat16", "2/2-channels-last-float64"])
def test_maxima_of_spikes_equal_torchs(window: str, form: str, dtype: str) -> None:
    check_maximum(draw_spikes().to(getattr(torch, dtype)).contiguous(memory_format=FORMATS[form]), WINDOWS[window])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("shape", "window"), [((1, 3, 4, 300), "3/2"), ((1, 72, 6, 8), "wide")])
def test_maxima_of_several_programs_equal_torchs(shape: tuple[int, ...], window: str) -> None:
    for form in FORMATS.values():
        check_maximum(draw_spikes(shape).contiguous(memory_format=form), WINDOWS[window])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS)
def test_maxima_of_special_values_equal_torchs(form: str) -> None:
    x = torch.randint(-2, 3, SHAPE, generator=torch.Generator().manual_seed(0)).float()
    x[0, 0, 3:6, 3:6] = -torch.inf
    x[1, 1] = -torch.inf
    x[2, 2, ::3, 1::4] = torch.nan
    x[0, 3, 0, 0] = torch.inf
    for window in ("3/2", "dilated"):
        check_maximum(x.contiguous(memory_format=FORMATS[form]), WINDOWS[window])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", UNDILATED)
@pytest.mark.parametrize(("pads", "divisor"), [(True, None), (False, None), (True, 7)])
@pytest.mark.long(all_but=["True-None-*", "False-None-ceil-*", "True-7-2/2-contiguous"])
def test_averages_equal_torchs(window: str, form: str, pads: bool, divisor: int | None) -> None:
    settings = WINDOWS[window]
    for dtype in (torch.float32, torch.bfloat16):
        x = draw_spikes().to(dtype).contiguous(memory_format=FORMATS[form])
        ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        y = average_pool(ours, settings, divisor, pads=pads)
        expected = F.avg_pool2d(exact, settings.size, settings.stride, settings.padding, settings.ceil, pads, divisor)
        theirs = F.avg_pool2d(x, settings.size, settings.stride, settings.padding, settings.ceil, pads, divisor)
        torch.testing.assert_close(y, expected.to(dtype))
        assert y.stride() == theirs.stride()
        assert torch.equal(y, average_pool(x, settings, divisor, pads=pads))
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        (of_ours,), (of_exact,) = (
            torch.autograd.grad(y, ours, grad),
            torch.autograd.grad(expected, exact, grad.double()),
        )
        torch.testing.assert_close(of_ours, of_exact.to(x.dtype))
        assert of_ours.stride() == ours.stride()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.long(all_but=["contiguous"])
def test_gradients_pass_gradgradcheck(form: str) -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64).contiguous(memory_format=FORMATS[form]).requires_grad_()

    def pooled(x: Tensor) -> Tensor:
        return max_pool(x, WINDOWS["3/2"])

    assert torch.autograd.gradcheck(pooled, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(pooled, x, fast_mode=True)

    def averaged(x: Tensor) -> Tensor:
        return average_pool(x, WINDOWS["ceil"], pads=False)

    assert torch.autograd.gradcheck(averaged, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(averaged, x, fast_mode=True)


@pytest.mark.usefixtures("interpreted")
def test_forward_saves_few_bits() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = draw_spikes((4, 8, 16, 16)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = max_pool(x, WINDOWS["3/2"])
        average_pool(x, WINDOWS["2/2"])
    assert [tensor.nbytes for tensor in saved] == [y.numel() // 2]  # 4 bits each
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = max_pool(x, WINDOWS["2/2"])
    assert [tensor.nbytes for tensor in saved] == [y.numel() // 4]


@pytest.mark.usefixtures("interpreted")
def test_views_and_gradients_of_other_formats_equal_torchs() -> None:
    x = draw_spikes((3, 5, 13, 11)).transpose(2, 3)
    check_maximum(x.contiguous(), WINDOWS["3/2"])
    ours = x.clone().requires_grad_()
    y = max_pool(ours[:, 1:4, ::2], WINDOWS["2/2"])
    grad = torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(y, ours, grad)
    theirs = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(pool_by_torch(theirs[:, 1:4, ::2], WINDOWS["2/2"]), theirs, grad)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.usefixtures("interpreted")
def test_transforms_use_pooling_of_torch() -> None:
    x = draw_spikes((4, 2, 3, 6, 6))
    window = WINDOWS["3/2"]
    maxima = torch.vmap(lambda x: max_pool(x, window))(x)
    assert torch.equal(maxima, pool_by_torch(x.flatten(0, 1), window).unflatten(0, (4, 2)))
    gradient = torch.func.grad(lambda x: max_pool(x, window).square().sum())(x[0])
    assert torch.equal(gradient, torch.func.grad(lambda x: pool_by_torch(x, window).square().sum())(x[0]))


def test_inputs_without_a_kernel_have_a_reason() -> None:
    window = WINDOWS["2/2"]
    cases: list[tuple[Any, Window]] = [
        (torch.zeros(2, 3, 8, 8, dtype=torch.int32), window),
        (torch.zeros(2, 3, 8, 8, device="meta"), window),
        (torch.zeros(3, 8, 8), window),
        (torch.zeros(2, 0, 8, 8), window),
        (torch.zeros(2, 3, 8, 8), Window((9, 8), (1, 1))),
        (torch.zeros(2, 3, 8, 8), Window((3, 3), (2, 2), (2, 0))),
        (torch.zeros(2, 3, 2, 2), Window((5, 5), (1, 1))),
    ]
    for x, unsupported in cases:
        assert why_no_kernel(x, unsupported)
    with pytest.raises(RuntimeError, match="pad should be at most"):
        max_pool(torch.zeros(2, 3, 8, 8), Window((3, 3), (2, 2), (2, 0)))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.long(all_but=["channels-last"])
def test_compiled_graphs_equal_eager_mode(form: str) -> None:
    x = draw_spikes((2, 3, 9, 8)).contiguous(memory_format=FORMATS[form])
    window = WINDOWS["3/2"]

    def layers(x: Tensor) -> Tensor:
        return max_pool(x * 2, window) + average_pool(x, window)

    torch._dynamo.reset()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual = torch.compile(layers, backend="aot_eager", fullgraph=True)(ours)
    expected = layers(theirs)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    grad = torch.randn(actual.shape)
    torch.testing.assert_close(torch.autograd.grad(actual, ours, grad), torch.autograd.grad(expected, theirs, grad))


@pytest.mark.usefixtures("interpreted")
def test_operators_pass_opcheck() -> None:
    from flexsn_runtime.pooling._maximum import max_pool_backward_op, max_pool_op

    settings: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    for form in FORMATS.values():
        x = draw_spikes((2, 3, 7, 8)).contiguous(memory_format=form).requires_grad_()
        torch.library.opcheck(max_pool_op, (x, *settings), test_utils=CHECKS)
        y, codes = max_pool_op(x.detach(), *settings)
        last = form is torch.channels_last
        backward = (torch.randn_like(y), codes, [*x.shape], *settings, last)
        torch.library.opcheck(max_pool_backward_op, backward, test_utils=CHECKS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", ["3/2", "2/2", "dilated", "ceil"])
def test_pooling_on_a_gpu_equals_torchs(window: str, form: str, dtype: str) -> None:
    for shape in (SHAPE, (8, 64, 56, 57), (33, 70, 31, 29), (4, 512, 14, 14), (2, 24, 9, 300)):
        x = draw_spikes(shape).to("cuda", getattr(torch, dtype)).contiguous(memory_format=FORMATS[form])
        check_maximum(x, WINDOWS[window])
        if window in UNDILATED:
            settings = WINDOWS[window]
            for pads, divisor in ((True, None), (False, None), (True, 7)):
                # The reference is contiguous, since some versions of torch have a wrong gradient for padded
                # channels-last inputs:
                # https://github.com/pytorch/pytorch/issues/188344
                ours, exact = x.clone().requires_grad_(), x.double().contiguous().requires_grad_()
                y = average_pool(ours, settings, divisor, pads=pads)
                expected = F.avg_pool2d(
                    exact, settings.size, settings.stride, settings.padding, settings.ceil, pads, divisor
                )
                torch.testing.assert_close(y, expected.to(x.dtype))
                grad = torch.randn_like(y)
                (gradient,) = torch.autograd.grad(y, ours, grad)
                (of_exact,) = torch.autograd.grad(expected, exact, grad.double())
                torch.testing.assert_close(gradient, of_exact.to(x.dtype))
