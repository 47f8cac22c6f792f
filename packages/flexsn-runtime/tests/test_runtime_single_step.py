"""`single_step` equals the loop. It repeats a prepared call until something changes, and then prepares a new call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flexsn_runtime import ScanProgram, TargetName, TransformError, prepare, single_step
from flexsn_runtime.program import _single_step

pytestmark = pytest.mark.usefixtures("compiler")


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 0.9, 5), requires_grad=False)
        self.threshold = 1.0

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v * self.w + x
        s = torch.relu(h - self.threshold)
        return s, h - s


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list with an entry for each prepared call."""
    num_arguments: list[int] = []

    def count_call(program: ScanProgram, flat_args: tuple[Tensor, ...]) -> object:
        num_arguments.append(len(flat_args))
        return prepare(program, flat_args)

    monkeypatch.setattr(_single_step, "prepare", count_call)
    return num_arguments


def check(program: ScanProgram, core: nn.Module, x: Tensor, v: Tensor) -> None:
    s, new = single_step(program, (x,), (v,))
    expected_s, expected = core(x, v)
    assert torch.equal(s, expected_s)
    assert torch.equal(new, expected)
    assert s.stride() == expected_s.stride()
    assert new.stride() == expected.stride()


@pytest.mark.parametrize("target", ["cpp", "triton"])
def test_prepared_step_is_used_until_a_change(prepared: list[int], target: TargetName, interpreted: None) -> None:
    core = Decay()
    program = ScanProgram(core, 1, 1, 1, on_cpu=target)
    x, v = torch.randn(3, 5), torch.randn(3, 5)
    for _ in range(4):
        check(program, core, torch.randn(3, 5), v)
    assert len(prepared) == 1
    core.w.copy_(torch.linspace(0.9, 0.1, 5))  # an update in place needs no preparation
    check(program, core, x, v)
    assert len(prepared) == 1
    core.threshold = 0.5
    check(program, core, x, v)
    core.w = nn.Parameter(torch.rand(10)[::2], requires_grad=False)  # with other strides
    check(program, core, x, v)
    check(program, core, torch.randn(5, 3).t(), torch.randn(5, 3).t())
    check(program, core, torch.randn(4, 5), torch.randn(4, 5))
    before = len(prepared)
    assert before > 4
    for _ in range(3):
        check(program, core, x, v)
    assert len(prepared) <= before + 1


def test_only_required_gradients_are_computed(prepared: list[int]) -> None:
    core = Decay()
    program = ScanProgram(core, 1, 1, 1, on_cpu="cpp")
    x, v = torch.randn(3, 5), torch.randn(3, 5)
    check(program, core, x, v)
    core.w.requires_grad_()
    s, new = single_step(program, (x,), (v,))
    (gradient,) = torch.autograd.grad((s + 2.0 * new).sum(), core.w)
    s, new = core(x, v)
    (expected,) = torch.autograd.grad((s + 2.0 * new).sum(), core.w)
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        for _ in range(2):
            s, _ = single_step(program, (x,), (v,))
            assert not s.requires_grad


def test_transform_is_refused_after_a_call_without_transforms(prepared: list[int]) -> None:
    core = Decay()
    program = ScanProgram(core, 1, 1, 1, on_cpu="cpp")
    x, v = torch.randn(3, 5), torch.randn(3, 5)
    check(program, core, x, v)
    with pytest.raises(TransformError):
        torch.func.vmap(lambda x: single_step(program, (x,), (v[0],))[0])(x)


def test_autocast_is_detected(prepared: list[int]) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x), v

    program = ScanProgram(core, 1, 1, 1, on_cpu="cpp")
    x, v = torch.randn(3, 5).bfloat16(), torch.randn(3, 5)
    for _ in range(2):
        assert single_step(program, (x,), (v,))[0].dtype == core(x, v)[0].dtype == torch.bfloat16
        with torch.autocast("cpu"):
            assert single_step(program, (x,), (v,))[0].dtype == core(x, v)[0].dtype
    assert len(prepared) == 2
