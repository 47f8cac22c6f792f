"""Pointwise kernels on a GPU. Compiled code launches them directly, and one launch updates a whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flexsn_codegen import pointwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),  # a warning of torch 2.11
]


def gated(x: Tensor, gate: Tensor, scale: float) -> Tensor:
    return x * functional.silu(gate) * scale


def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, betas: tuple[float, float], eps: float, wd: float
) -> None:
    p.mul_(1 - lr * wd)
    m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    p.addcdiv_(m, (v.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps), value=-lr / (1 - betas[0] ** step))


def test_inductor_launches_the_kernel_directly() -> None:
    from torch._inductor.utils import run_and_get_code

    fused: Any = pointwise(gated, autograd=True)
    compiled = torch.compile(lambda x, g: fused(x * 2, g, 0.5).relu(), fullgraph=True, dynamic=True)
    x = torch.randn(100, 33, device="cuda", requires_grad=True)
    gate = torch.randn(33, device="cuda", requires_grad=True)
    result, codes = run_and_get_code(compiled, x, gate)
    assert any("gated_kernel" in code for code in codes)
    assert not any("flexsn_codegen.pointwise" in code for code in codes)
    torch.testing.assert_close(result, gated(x * 2, gate, 0.5).relu())
    actual = torch.autograd.grad(result.sum(), (x, gate))
    for a, e in zip(actual, torch.autograd.grad(gated(x * 2, gate, 0.5).relu().sum(), (x, gate)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_compiled_code_accepts_a_transposed_operand() -> None:
    fused: Any = pointwise(lambda x, y: (x + y) * 0.5)
    compiled = torch.compile(lambda x, y: fused(x, y.t()) * 2, fullgraph=True)
    x, y = torch.randn(1000, 70, device="cuda"), torch.randn(70, 1000, device="cuda")
    torch.testing.assert_close(compiled(x, y), x + y.t())


def test_writes_in_compiled_code_equal_eager_mode() -> None:
    step = pointwise(lambda p, g: p.sub_(g, alpha=0.1))
    compiled = torch.compile(lambda p, g: step(p, g) * 2, fullgraph=True)
    p, g = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    expected = p - 0.1 * g
    result = compiled(p, g)
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close(result, expected * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_over_a_model_equals_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [(513, 257), (4096,), (64, 3, 3, 3), (7,), ()]
    start = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    # A bfloat16 step rounds a dozen times, and torch's step rounds at other points. So both steps are compared with the
    # step of torch in float64.
    theirs = {kind: [t.clone().to(kind).requires_grad_() for t in start] for kind in (dtype, torch.float64)}
    optimizers = [torch.optim.AdamW(t, lr=1e-3, weight_decay=0.1, foreach=False, fused=False) for t in theirs.values()]
    m, v = [torch.zeros_like(t) for t in start], [torch.zeros_like(t) for t in start]
    step = pointwise(adamw)
    for i in range(5):
        gradients = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
        for kind, parameters in theirs.items():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(kind)
        for optimizer in optimizers:
            optimizer.step()
        step.foreach(start, gradients, m, v, i + 1, 1e-3, (0.9, 0.999), 1e-8, 0.1)

    def distances(tensors: list[Tensor]) -> Tensor:
        pairs = zip(tensors, theirs[torch.float64], strict=True)
        return torch.cat([(a.detach().double() - exact.detach()).flatten() for a, exact in pairs])

    ours, torchs = distances(start), distances(theirs[dtype])
    assert ours.square().mean() <= torchs.square().mean() * 1.02
    assert ours.abs().max() <= torchs.abs().max() * 1.5
