"""Kernels can write to their arguments, and to existing tensors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsn_codegen import ArgumentError, AutogradError, TransformError, WriteError, pointwise
from flexsn_codegen.functions._prepared import NOT_PREPARED, PreparedCalls


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    """Sets up kernels in C++, as in a process without TRITON_INTERPRET."""
    from flexsn_codegen.targets.triton import device

    monkeypatch.setattr(device, "INTERPRETED", False)


def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, betas: tuple[float, float], eps: float, wd: float
) -> None:
    """Performs a step of AdamW as defined in papers and in torch.optim."""
    beta1, beta2 = betas
    p.mul_(1 - lr * wd)
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


def lion(p: Tensor, g: Tensor, m: Tensor, lr: float, beta1: float, beta2: float, decay: float) -> None:
    p.mul_(1 - lr * decay).sub_(torch.sign(m * beta1 + g * (1 - beta1)), alpha=lr)
    m.mul_(beta2).add_(g, alpha=1 - beta2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(9001, dtype=dtype), torch.randn(6, 9001, dtype=dtype)
    parameter = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, foreach=False)
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    step = pointwise(adamw)
    for i, gradient in enumerate(gradients):
        lr = 1e-3 * (i + 1)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = gradient
        optimizer.step()
        assert step(p, gradient, m, v, i + 1, lr, (0.9, 0.99), 1e-8, 0.1) is None
    # Torch's CPU code fuses some multiplications with additions. This changes a few units in the last place.
    torch.testing.assert_close(p, parameter.detach(), rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert sum(len(traces) for kernel in step._kernels.all() for traces in kernel._variants.values()) == 1


def test_lion_equals_eager_mode() -> None:
    torch.manual_seed(0)
    runs = []
    for function in (pointwise(lion), lion):
        torch.manual_seed(0)
        p, m = torch.randn(501), torch.randn(501)
        for _ in range(3):
            function(p, torch.randn(501), m, 1e-2, 0.9, 0.99, 0.1)
        runs.append((p, m))
    for a, e in zip(*runs, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=5e-7)


def test_callers_tensor_is_returned() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(y), x * 2

    x, y = torch.rand(4, 5).t(), torch.rand(5, 4)
    expected = function(x.clone(), y)
    version = x._version
    first, second = pointwise(function)(x, y)
    assert first is x
    assert x._version > version
    for a, e in zip((first, second), expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[::2, 1:], lambda t: t[:, :1], lambda t: t.flip(0)[:0]]
)
def test_strided_tensors_are_written_in_place(view: Any) -> None:
    memory = torch.rand(6, 6)
    before, x = memory.clone(), view(memory)
    y = torch.rand(x.shape[1])
    pointwise(lambda x, y: x.sub_(y))(x, y)
    view(before).sub_(y)
    assert torch.equal(memory, before)


def test_into_writes_to_existing_tensors() -> None:
    x, out, mask = torch.rand(3, 4), torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.bool)
    kernel = pointwise(lambda x, a: (x * a, x > a))
    first, second = kernel.into([out, mask], x, 0.5)
    assert torch.equal(out, x * 0.5)
    assert torch.equal(mask, x > 0.5)
    assert first.data_ptr() == out.data_ptr()
    assert second.data_ptr() == mask.data_ptr()
    pointwise(torch.neg).into(x, x)
    assert torch.equal(x * -0.5, out)
    with pytest.raises(ArgumentError, match=r"tensor 1 of out= is \[3, 4\] torch.float32"):
        kernel.into([out, torch.zeros(3, 4)], x, 0.5)
    with pytest.raises(ArgumentError, match="2 results, but out= contains 1"):
        kernel.into(out, x, 0.5)
    with pytest.raises(WriteError, match="tensor 0 of out="):
        pointwise(torch.neg).into(x[:, 1:], x[:, :3])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_repeated_calls_of_into_are_not_checked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pointwise(lambda x, y: (x * y, x > y))

    def tensors(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(seed)
        out = [torch.zeros(4099, 3, device=device), torch.zeros(4099, 3, dtype=torch.bool, device=device)]
        return out, [torch.rand(4099, 6).to(device)[:, ::2], torch.rand(4099, 3).to(device)]

    out, (x, y) = tensors(0)
    again = kernel.repeated_into(out, x, y)
    assert torch.equal(out[0], x * y)
    monkeypatch.setattr(PreparedCalls, "call", None)  # repeated calls must not use this method
    for seed in range(1, 4):
        out, (x, y) = tensors(seed)
        version = out[0]._version
        again(out, (x, y))
        assert torch.equal(out[0], x * y)
        assert torch.equal(out[1], x > y)
        assert out[0]._version > version


def test_repeated_calls_of_into_use_current_values() -> None:
    offset = torch.rand(5)
    kernel = pointwise(lambda x: x + offset)
    out, x = torch.zeros(7, 5), torch.rand(7, 5)
    again = kernel.repeated_into([out], x)
    assert torch.equal(out, x + offset)
    expected = x + offset.mul_(2)
    again([out], [x])
    assert torch.equal(out, expected)
    kernel.repeated_into([out[:0]], x[:0])([out[:0]], [x[:0]])
    with pytest.raises(ArgumentError, match="out="):
        kernel.repeated_into([torch.zeros(3)], x)


def test_repeated_into_compares_tensors_that_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    call = PreparedCalls.call

    def record_call(calls: PreparedCalls, *arguments: Any) -> Any:
        result = call(calls, *arguments)
        prepared.append(result is not NOT_PREPARED)
        return result

    monkeypatch.setattr(PreparedCalls, "call", record_call)
    offset = torch.rand(8, 3)
    kernel = pointwise(lambda x, a: x * a + offset)
    memory = torch.rand(16, 6)
    x, other, above, below = memory[:8, ::2], torch.rand(8, 3), memory[:8, 1::2], memory[8:, ::2]
    for out, a, is_repeated in (
        (above, 0.5, False),
        (above, 2.0, True),
        (below, 0.5, False),  # a tensor with an equal layout, elsewhere in the input's memory
        (below, 0.25, True),
        (torch.empty(8, 6)[:, ::2], 0.5, False),  # a tensor in other memory
        (torch.empty(8, 6)[:, ::2], 0.75, True),
        (x, 0.5, False),  # the input itself
        (x, 1.5, True),
        (offset, 0.5, False),  # the captured tensor
    ):
        expected, version = x * a + offset, out._version
        result = kernel.into(out, x, a)
        assert torch.equal(out, expected)
        assert result is out
        assert out._version > version
        assert prepared.pop() is is_repeated
    with pytest.raises(WriteError, match="tensor 0 of out="):
        kernel.into(memory[1:9, ::2], x, 0.5)
    with pytest.raises(WriteError, match="tensor 0 of out="):
        kernel.into(torch.empty(3).expand(8, 3), other, 0.5)
    assert not any(prepared)


def test_into_is_refused_while_a_graph_is_recorded() -> None:
    kernel, x = pointwise(torch.neg), torch.rand(3)
    kernel.into(torch.empty(3), x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.empty(3))
    with pytest.raises(TransformError, match="into cannot be recorded"):
        kernel.into(fake, x)


def test_writes_are_allowed_under_inference_mode_and_by_a_copy() -> None:
    kernel = copy.deepcopy(pointwise(torch.neg))
    with torch.inference_mode():
        x = torch.rand(5)
        out = torch.empty(5)
        kernel.into(out, x)
        assert torch.equal(out, -x)
        pointwise(lambda x: x.mul_(2))(x)
        assert torch.equal(out, -x / 2)


def test_tensors_that_cannot_be_written_are_refused() -> None:
    add = pointwise(lambda x, y: x.add_(y))
    x = torch.rand(6)
    for bad in (torch.rand(1).expand(6), torch.rand(8).unfold(0, 3, 1), torch.rand(6, 2).as_strided((3, 4), (1, 2))):
        with pytest.raises(WriteError, match=r"tensor 0 of <lambda>.*several elements at one address"):
            add(bad, torch.rand(bad.shape))
    with pytest.raises(WriteError, match="shares memory with tensor 1"):
        add(x[1:], x[:-1])
    with pytest.raises(WriteError, match="shares memory with tensor 1"):
        add(x, x)
    add(x[:3], x[3:])  # these tensors do not overlap
    columns = torch.rand(4, 2)
    add(columns[:, 0], columns[:, 1])
    with pytest.raises(ArgumentError, match=r"of shape \[3\], but its arguments broadcast to \[2, 3\]"):
        add(torch.rand(3), torch.rand(2, 3))
    with pytest.raises(AutogradError, match="no_grad"):
        add(x, torch.rand(6, requires_grad=True))
    leaf = torch.rand(6, requires_grad=True)
    with torch.no_grad():
        expected = leaf + x
        add(leaf, x)
    assert torch.equal(leaf, expected)


@pytest.mark.parametrize("calls_before", [0, 2])
def test_results_are_not_written_to_tensors_that_require_a_gradient(calls_before: int) -> None:
    """Checks that this is rejected. Otherwise, the tensor's own gradient would flow on unchanged."""
    kernel, a = pointwise(lambda a, b: a + b), torch.ones(50, 37)
    for _ in range(calls_before):
        kernel.into(torch.empty(50, 37), a, a)
    leaf = torch.zeros(50, 37, requires_grad=True)
    for out in (leaf, leaf * 5):
        with pytest.raises(AutogradError, match=r"Call <lambda> under torch\.no_grad\(\)"):
            kernel.into(out, a, a)
        assert not out.any()
        with torch.no_grad():
            kernel.into(out, a, a)
        assert (out == 2).all()
        out.detach().zero_()
