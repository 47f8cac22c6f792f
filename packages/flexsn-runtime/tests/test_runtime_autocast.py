"""Autocast applies inside of a core, as in a loop. On the CPU, autocast computes losses in float32."""

from __future__ import annotations

import pytest
import torch
from runtime_cores import DEVICE, STEP, compiled, loop, random
from torch import Tensor
from torch.nn.functional import mse_loss

from flexsn_graph import StateMismatchError
from flexsn_runtime import ScanProgram

HALF = torch.bfloat16


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE.type, dtype=HALF)


def widened(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    loss = mse_loss(x, v, reduction="none")  # autocast computes the loss in float32
    return loss, (v * 0.5 + loss).to(v.dtype)


def draw_halves(*, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    x, v = random(5, *STEP, dtype=HALF), random(*STEP, dtype=HALF, seed=1)
    return x.requires_grad_(requires_grad), v


def test_program_runs_with_and_without_autocast() -> None:
    program = ScanProgram(widened, 1, 1, 1)
    x, v = draw_halves()
    for _ in range(2):
        narrow_results = compiled(program, 1, [x], [v])
        assert [t.dtype for t in narrow_results] == [HALF, HALF]
        with autocast():
            wide_results = compiled(program, 1, [x], [v])
            expected = loop(widened, 1, [x], [v])
        assert [t.dtype for t in wide_results] == [torch.float32, HALF]
        for actual, reference in zip(wide_results, expected, strict=True):
            assert actual.dtype == reference.dtype
            assert torch.equal(actual, reference)
        assert not torch.equal(narrow_results[0].float(), wide_results[0])
    assert len(program.specializations) == 2


def test_gradients_may_be_computed_outside_of_autocast() -> None:
    gradients = []
    for run in (compiled, loop):
        x, v = draw_halves(requires_grad=True)
        with autocast():
            output = run(widened, 1, [x], [v])[0]
        gradients.append(torch.autograd.grad(output.sum(), x)[0])
    assert torch.equal(*gradients)


def test_captured_tensors_have_gradients_under_autocast() -> None:
    w = random(STEP[1], seed=2).requires_grad_()
    x, v = draw_halves()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return mse_loss(x, v, reduction="none") * w, v

    program = ScanProgram(core, 1, 1, 1)
    for _ in range(2):
        with autocast():
            output = compiled(program, 1, [x], [v])[0]
            expected = loop(core, 1, [x], [v])[0]
        assert torch.equal(output, expected)
        (actual,), (reference,) = (torch.autograd.grad(o.sum(), w) for o in (output, expected))
        torch.testing.assert_close(actual, reference)
        with torch.no_grad():
            w.mul_(2.0)


def test_state_that_autocast_widens_is_refused() -> None:
    x, v = draw_halves()
    program = ScanProgram(lambda x, v: (x, mse_loss(x, v, reduction="none")), 1, 1, 1)
    with autocast(), pytest.raises(StateMismatchError, match=r"comes out as .* float32.*precision='float32'"):
        compiled(program, 1, [x], [v])
    compiled(program, 1, [x], [v])


def test_operations_before_the_loop_follow_autocast() -> None:
    table = random(STEP[1], STEP[1], seed=3).requires_grad_()
    x, v = draw_halves()

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        product = table @ table  # autocast computes the product in bfloat16
        return x * product[0] + v, v * 0.5 + x * table.softmax(1)[1].to(x.dtype)

    with autocast():
        output = compiled(core, 1, [x], [v])[0]
        expected = loop(core, 1, [x], [v])[0]
    assert output.dtype == expected.dtype == HALF
    assert torch.equal(output, expected)
    gradient, reference = (torch.autograd.grad(o.float().sum(), table)[0] for o in (output, expected))
    assert gradient.dtype == reference.dtype == torch.float32
    # The loop rounds the product's gradient at each step.
    torch.testing.assert_close(gradient, reference, rtol=0.05, atol=0.02 * float(reference.abs().max()))
