"""Kernels of delays: values, states and gradients equal those of PyTorch's operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import flexsn_nn._delay
from flexsn_nn.layer import Delay
from flexsn_runtime.delays import _delayed

# Numbers of steps that are no multiple of a program's block, with one delay per neuron, per channel, for all, or per
# element.
SHAPES = [((11, 3, 5), (5,)), ((3, 2, 3, 4), (3, 1)), ((11, 3, 5), (1,)), ((9, 2, 3, 4), (2, 1, 4))]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "triangle": {"interpolation": "triangle", "width": 1.3},
    "gaussian": {"interpolation": "gaussian", "width": 1.3},
}


def make_delay(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Delay:
    delay = 6 * torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Delay(delay.to(dtype), max_delay=6, learn=True, **KINDS[kind])


def run(layer: Delay, x: Tensor) -> list[Tensor]:
    """Returns the results of two calls, the state after them, and the gradients."""
    leaf = x.clone().requires_grad_()
    outputs = [layer(leaf), layer(leaf * 2)]
    weights = torch.arange(x.numel(), device=x.device).cos().view(x.shape).to(x.dtype)
    loss = sum((output * weights).sum() for output in outputs)
    assert isinstance(loss, Tensor)
    assert isinstance(layer.delay, Tensor)
    gradients = torch.autograd.grad(loss, [leaf, layer.delay], materialize_grads=True)
    return [*(output.detach() for output in outputs), layer.states[0].detach(), *gradients]


def check_against_operations(
    kind: str,
    shape: tuple[int, ...],
    delay_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    training: bool = True,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
    layer = make_delay(kind, delay_shape, dtype).to(device).train(training)
    loop = copy.deepcopy(layer)
    calls: list[str] = []
    for name in ("delay_between", "delay_by_taps"):
        function = getattr(flexsn_nn._delay, name)

        def count(*a: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*a)

        monkeypatch.setattr(flexsn_nn._delay, name, count)
    results = run(layer, x)
    assert calls == ["delay_by_taps" if training and kind != "linear" else "delay_between"] * 2
    monkeypatch.setattr(flexsn_nn._delay, "why_no_delay_kernel", lambda x: "PyTorch's operations are compared with")
    expected = run(loop, x)
    assert len(calls) == 2
    if kind == "linear" or not training:
        assert torch.equal(results[0], expected[0])
        assert torch.equal(results[1], expected[1])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "delay_shape"), SHAPES)
@pytest.mark.long(all_but=["shape1-delay_shape1-*", "shape0-delay_shape0-linear"])
def test_gradients_equal_those_of_operations(
    shape: tuple[int, ...], delay_shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_delayed, "_DEVICES", {"cpu"})
    check_against_operations(kind, shape, delay_shape, torch.float64, "cpu", monkeypatch)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["linear", "gaussian"])
@pytest.mark.long(all_but=["gaussian"])
def test_evaluation_equals_that_of_operations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_delayed, "_DEVICES", {"cpu"})
    check_against_operations(kind, *SHAPES[0], torch.float32, "cpu", monkeypatch, training=False)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long(all_but=["linear"])
def test_second_gradients_equal_those_of_operations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_delayed, "_DEVICES", {"cpu"})
    layer = make_delay(kind, (4,), torch.float64)

    def function(x: Tensor, delay: Tensor) -> Tensor:
        layer.reset()
        return torch.func.functional_call(layer, {"delay": delay}, (x,))  # type: ignore[no-any-return]

    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    delay = layer.delay.detach().requires_grad_()  # type: ignore[union-attr]
    assert torch.autograd.gradgradcheck(function, (x, delay))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "delay_shape"), [*SHAPES, ((100, 7, 130), (130,))])
def test_kernels_on_a_gpu_equal_operations(
    shape: tuple[int, ...],
    delay_shape: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype == torch.bfloat16:
        x = torch.randn(shape, device="cuda", dtype=dtype)
        layer = make_delay(kind, delay_shape, torch.float32).cuda()
        ours = layer(x)
        monkeypatch.setattr(flexsn_nn._delay, "why_no_delay_kernel", lambda x: "PyTorch's operations are compared with")
        layer.reset()
        torch.testing.assert_close(ours, layer(x), rtol=1e-2, atol=1e-2)
    else:
        check_against_operations(kind, shape, delay_shape, dtype, "cuda", monkeypatch)
