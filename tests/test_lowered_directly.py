"""Direct calls of the lowering to kernels, without a compiler, with checkpoints at any distance and zero gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn_hop import BackwardLayout, ScanLayout, eager_scan_final_state
from flexsn_hop.operator._vjp import step_vjp
from flexsn_runtime import KernelLowering
from flexsn_runtime.graphs._graph_step import GraphSpecialization

pytestmark = pytest.mark.usefixtures("compiler")


def decay(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(0.9 * v + x * w)
    return h, h


@pytest.mark.long(all_but=["66-70", "1048576-21"])
@pytest.mark.parametrize("steps", [21, 70])
@pytest.mark.parametrize("interval", [1, 4, 12, 66, 2**20])
def test_checkpoints_may_have_any_distance(interval: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    plan = GraphSpecialization.plan

    def record(step: GraphSpecialization, ncl: int) -> object:
        launch_plan = plan(step, ncl)
        chunks.extend((launch_plan.forward.chunk, launch_plan.backward.chunk))
        return launch_plan

    monkeypatch.setattr(GraphSpecialization, "plan", record)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, 3, 5, generator=generator, requires_grad=True)
    v = torch.randn(3, 5, generator=generator, requires_grad=True)
    w = torch.randn(5, generator=generator, requires_grad=True)
    expected = eager_scan_final_state(decay, 1, 1, 1, x, v, w)
    cotangents = [torch.randn(r.shape, generator=generator) for r in expected]
    gradients = torch.autograd.grad(expected, (x, v, w), cotangents)

    arguments = [t.detach() for t in (x, v, w)]
    layout = ScanLayout(1, 1, 1, final_state=True, checkpoint_interval=interval)
    backward = BackwardLayout(
        ScanLayout(1, 1, 1, final_state=True), (True,) * 3, (True,), (True,), (True,), saved_interval=interval
    )
    one_step = [arguments[0][0], *arguments[1:]]
    core = make_fx(lambda *values: decay(*values))(*one_step)
    vjp = make_fx(step_vjp(decay, backward))(*one_step, *(torch.ones(3, 5) for _ in range(2)))
    lowering = KernelLowering()
    *results, saved = lowering.forward(core, layout, arguments)
    torch.testing.assert_close(results, [r.detach() for r in expected])

    # The loop saves these states for the backward, which may have another lowering.
    checkpoints = [eager_scan_final_state(decay, 1, 1, 1, x[:t], v, w)[1] for t in range(interval, steps, interval)]
    assert len(saved) == len(checkpoints)
    if checkpoints:
        torch.testing.assert_close(saved, torch.stack(checkpoints).detach())
    kernel_gradients = lowering.backward(core, vjp, backward, [*arguments, saved, *cotangents])
    torch.testing.assert_close(kernel_gradients, list(gradients))
    assert max(chunks) <= 8 or max(chunks) == interval == 12


def test_gradients_of_steps_with_products_may_be_zero() -> None:
    def step(x: Tensor, v: Tensor, matrix: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(v @ matrix + x)
        return z, z + (z * w).detach()

    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 2, 4), (2, 4), (4, 4), (4,)]
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    expected = eager_scan_final_state(step, 1, 1, 1, *leaves)
    cotangents = [torch.randn(r.shape, generator=generator) for r in expected]
    gradients = torch.autograd.grad(expected, leaves, cotangents, materialize_grads=True, allow_unused=True)

    arguments = [leaf.detach() for leaf in leaves]
    one_step = [arguments[0][0], *arguments[1:]]
    layout = BackwardLayout(
        ScanLayout(1, 1, 1, final_state=True), (True,) * 4, (True,), (True,), (True,), saved_interval=2**20
    )
    core = make_fx(lambda *values: step(*values))(*one_step)
    vjp = make_fx(step_vjp(step, layout))(*one_step, *(torch.ones(2, 4) for _ in range(2)))
    saved = torch.empty(0, 2, 4)
    results = KernelLowering().backward(core, vjp, layout, [*arguments, saved, *cotangents])
    torch.testing.assert_close(results, list(gradients))
