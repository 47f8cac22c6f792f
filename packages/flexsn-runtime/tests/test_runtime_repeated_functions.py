"""The compiled launcher repeats functions of tensors for each layout, and runs hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_runtime import _few_bits, batch_moments, pack_numbers, unpack_numbers
from flexsn_runtime.moments import _moments
from flexsn_runtime.native import RepeatedFunction, compiled_launcher, saving_hooks

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "compiled")


def draw_numbers(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def compute(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Calls operators with new tensors, views, lists and named arguments, and an operator that writes in place."""
    x, total = tensors
    total.add_(x.sum(0), alpha=2)
    first, second = x.view(2, -1, 6).unbind(0)
    joined = torch.cat([second, first, second.t().contiguous().t()])
    value, place = joined.max(dim=0)
    return joined @ x.t(), value, place, x.new_zeros(3)[1:]


def test_calls_of_several_layouts_need_no_python() -> None:
    entered: list[int] = []

    def function(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        entered.append(len(tensors[0]))
        return compute(tensors)

    repeated = RepeatedFunction(function)
    for seed in range(4):
        for rows in (4, 8):
            x = draw_numbers(rows, seed)
            actual_total, expected_total = torch.zeros(6), torch.zeros(6)
            actual, expected = repeated((x, actual_total)), compute((x, expected_total))
            assert all(map(torch.equal, (*actual, actual_total), (*expected, expected_total)))
            assert not any(tensor._is_view() for tensor in actual[:3])
    assert entered == [4, 8, 4, 8]
    crosswise = draw_numbers(6, 9)[:, :4].t()
    assert torch.equal(repeated((crosswise, torch.zeros(6)))[1], compute((crosswise, torch.zeros(6)))[1])
    assert len(entered) == 5


def test_functions_that_read_numbers_run_in_python() -> None:
    repeated = RepeatedFunction(lambda tensors: (tensors[0] * tensors[0].sum().item(),))
    for seed in range(4):
        x = draw_numbers(4, seed)
        assert torch.equal(repeated((x,))[0], x * x.sum().item())


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [1, 2])
def test_bits_are_read_and_written_without_python(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in range(4):
        if call == 2:
            monkeypatch.setattr(_few_bits, "_launch", None)
        generator = torch.Generator().manual_seed(call)
        spikes = torch.randint(0, 1 << bits, (264 + 8 * bits,), generator=generator).bfloat16().cuda()
        packed = pack_numbers(spikes, bits, 0)
        assert packed is not None
        assert packed.nbytes == len(spikes) * bits // 8
        unpacked = unpack_numbers(packed, bits, 0, torch.bfloat16)
        assert unpacked is not None
        assert torch.equal(unpacked, spikes)


@pytest.mark.gpu
def test_moments_are_computed_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    running, counter = (torch.zeros(6, device="cuda"), torch.ones(6, device="cuda")), torch.zeros((), dtype=torch.int64)
    moved, tracked = [buffer.clone() for buffer in running], counter.cuda()
    for call in range(4):
        if call == 2:
            monkeypatch.setattr(_moments, "moments", None)
        x = torch.randn(30, 6, 5, generator=torch.Generator().manual_seed(call)).cuda()
        moments = batch_moments(x, running, 0.25, tracked)
        assert moments is not None
        var, mean = torch.var_mean(x, (0, 2), correction=0)
        torch.testing.assert_close(moments, (mean, var))
        torch.nn.functional.batch_norm(x, moved[0], moved[1], training=True, momentum=0.25)
        torch.testing.assert_close(list(running), moved)
        assert int(tracked) == call + 1
    assert running[0]._version == 4


class Twice(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grads[0] * torch.ones_like(x)


def test_hooks_call_python_only_for_possible_spikes() -> None:
    compiled_launcher(torch.device("cpu"), 1)
    lengths: list[int] = []

    def pack(tensor: Tensor) -> tuple[Tensor] | None:
        lengths.append(len(tensor))
        return (tensor.detach().clone(),) if len(tensor) == 8 else None

    hooks = saving_hooks(pack, lambda saved: saved[0], lambda *_: None, 64, ["Slice"], ["Addmm", "Mm"])
    assert hooks is not None
    leaf, weight = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4)
    for rows, source in ((8, leaf * 3), (6, (leaf * 3)[:6]), (2, leaf[:2] * 3), (5, leaf[:5] @ weight), (8, leaf)):
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            y = Twice.apply(source)
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
        assert gradient.any()
        assert len(y) == rows
    assert lengths == [8, 6]
    changed = leaf * 3
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        y = Twice.apply(changed[:6])
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[6, 4\].* changed in place since the forward"):
        y.sum().backward()


def test_hooks_run_in_python_if_python_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_LAUNCHER", "python")
    assert saving_hooks(lambda tensor: None, lambda saved: saved, lambda *_: None, 64, [], []) is None
