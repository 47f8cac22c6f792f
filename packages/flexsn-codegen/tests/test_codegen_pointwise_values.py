"""In compiled code, one graph serves all values of a Python number, instead of one graph per value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexsn_codegen import TraceError, pointwise


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(p: Tensor, g: Tensor, m: Tensor, lr: float, t: int) -> Tensor:
    m.mul_(0.9).add_(g, alpha=0.1)
    return p.sub_(m, alpha=lr / (1 - 0.9**t))


def gated(x: Tensor, gate: Tensor, scale: float) -> Tensor:
    return torch.sigmoid(gate) * x * scale


@pytest.mark.long(all_but=["aot_eager"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_five_learning_rates_need_two_graphs_and_one_kernel(backend: str) -> None:
    fused = pointwise(step)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *a: fused(*a) * 2, backend=counter, fullgraph=True)
    runs = []
    for function in (compiled, lambda *a: step(*a) * 2):
        torch.manual_seed(0)
        p, m = torch.randn(70), torch.randn(70)
        results = [function(p, torch.randn(70), m, 0.1 / (1 + t), t + 1).clone() for t in range(5)]
        runs.append([p, m, *results])
    for a, e in zip(*runs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 2
    assert sum(len(traces) for kernel in fused._kernels.all() for traces in kernel._variants.values()) == 1


@pytest.mark.long(all_but=["aot_eager"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_five_scales_need_two_graphs(backend: str) -> None:
    fused = pointwise(gated, autograd=True)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, g, s: fused(x * 2, g, s).relu(), backend=counter, fullgraph=True)
    for i in range(5):
        scale = 0.5 + 0.3 * i
        x, gate = torch.randn(9, 7, requires_grad=True), torch.randn(7, requires_grad=True)
        actual, expected = compiled(x, gate, scale), gated(x * 2, gate, scale).relu()
        torch.testing.assert_close(actual, expected)
        pairs = zip(*(torch.autograd.grad(r.sum(), (x, gate)) for r in (actual, expected)), strict=True)
        for a, e in pairs:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


def test_number_that_decides_the_dtype_is_refused_at_run_time() -> None:
    fused: Any = pointwise(lambda x, s: x.double() * s if s > 1.0 else x * s)
    compiled = torch.compile(lambda x, s: fused(x, s), backend="aot_eager", fullgraph=True)
    x = torch.randn(5)
    for s in (0.5, 0.75, 0.25):
        torch.testing.assert_close(compiled(x, s), x * s)
    with pytest.raises(TraceError, match=r"float64\] for \[1.5\](.|\n)*has to be a constant of the graph"):
        compiled(x, 1.5)


def test_large_float16_values_become_infinite_after_a_conversion_to_bfloat16() -> None:
    """Checks that a kernel rounds to float16 again: bfloat16 rounds 65504 to 65536, which is infinite in float16."""

    def halve(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(torch.float16) * 0.5

    x = torch.tensor([65504, -65504, 3.1, 1e-7], dtype=torch.float16).repeat(70)
    assert torch.equal(pointwise(halve)(x), halve(x))
    assert halve(x).isinf().any()
