"""A compiled scan's backward omits absent gradients, so that no zero is multiplied by an infinite derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hop_alone import no_kernels  # noqa: F401  a fixture
from torch import Tensor

from flexsn_hop import eager_scan_final_state, flex_sn_scan_final_state

CORES: dict[str, Callable[..., Any]] = {
    "root": lambda x, v, u: (x + v, torch.sqrt(v.abs()), u),
    "passed on": lambda x, v, u: (x + v, torch.sqrt(u.abs()), torch.sqrt(x.abs()) + v),
    "masked": lambda x, v, u: (x + u, torch.where(x > 0, torch.sqrt(v.abs()), v), u - torch.log(x.abs())),
    "joined": lambda x, v, u: (x + v, torch.cat([v[:1].abs().sqrt(), u[1:]]), torch.stack([*v[1:], u[0].abs().sqrt()])),
}


@pytest.mark.long(all_but=["root-5-in_loss0", "masked-1-in_loss2", "joined-2-in_loss1", "passed on-5-in_loss0"])
@pytest.mark.parametrize("in_loss", [(True, False, False), (False, True, False), (True, False, True)])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", CORES)
def test_absent_gradients_equal_those_of_the_loop(name: str, steps: int, in_loss: tuple[bool, ...]) -> None:
    assert_equals_the_loop(name, steps, in_loss, "aot_eager")


@pytest.mark.long(all_but=["joined"])
@pytest.mark.parametrize("name", ["passed on", "joined"])
def test_absent_gradients_equal_those_of_the_loop_in_compiled_code(name: str) -> None:
    assert_equals_the_loop(name, 3, (True, False, False), "inductor")


def test_values_that_no_gradient_reaches_have_no_gradient() -> None:
    x, v, w = torch.ones(3, 2), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def loss(x: Tensor, v: Tensor) -> Tensor:
        return flex_sn_scan_final_state(lambda x, v: (x + v, v * x + (w * v).detach()), 1, 1, 1, x, v)[0].sum()

    actual = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x, v), [v, w], allow_unused=True)
    assert actual[1] is None
    torch.testing.assert_close(actual[0], torch.full((2,), 3.0))


def assert_equals_the_loop(name: str, steps: int, in_loss: tuple[bool, ...], backend: str) -> None:
    x = torch.linspace(-1, 1, steps * 3, dtype=torch.float64).view(steps, 3).requires_grad_()
    states = [torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64).requires_grad_() for _ in range(2)]

    def gradients(scan: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
        def loss(*args: Tensor) -> Tensor:
            results = scan(CORES[name], 1, 2, 1, *args)
            return torch.stack([r.sum() for r, is_present in zip(results, in_loss, strict=True) if is_present]).sum()

        run = loss if scan is eager_scan_final_state else torch.compile(loss, backend=backend)
        return torch.autograd.grad(run(x, *states), [x, *states], allow_unused=True)

    torch._dynamo.reset()
    for actual, expected in zip(gradients(flex_sn_scan_final_state), gradients(eager_scan_final_state), strict=True):
        if actual is None:
            assert expected is None
            continue
        # If a gradient exists in later steps only, the operator returns zeros, and the loop returns None.
        reference = torch.zeros_like(actual) if expected is None else expected
        torch.testing.assert_close(actual, reference, equal_nan=True)
