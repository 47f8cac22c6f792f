"""A kernel over lists of tensors: one launch in Triton, here in its interpreter; one after the other in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen import ArgumentError, AutogradError, _foreach, pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lion(p: Tensor, g: Tensor, m: Tensor, lr: float, betas: tuple[float, float]) -> None:
    p.sub_(torch.sign(m * betas[0] + g * (1 - betas[0])), alpha=lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


def tensors(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]


@pytest.fixture(params=["triton", "cpp"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from flexsn_codegen.targets.triton import device

    if request.param == "cpp":
        if DEVICE == "cuda":
            pytest.skip("C++ is for the CPU")
        request.getfixturevalue("compiler")
        monkeypatch.setattr(device, "INTERPRETED", False)
    return str(request.param)


def test_a_step_over_all_parameters(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    once = _foreach.Group.launch

    def counted(group: _foreach.Group, numbers: Any) -> None:
        launched.append(group.table.shape[0])
        once(group, numbers)

    monkeypatch.setattr(_foreach.Group, "launch", counted)
    # Several programs, not a multiple of one; empty; without dimensions.
    sizes = [(3, 1001), (7,), (), (0, 4), (2, 3, 5), (64, 20)]
    step = pointwise(lion)
    again = tensors(sizes, torch.float32, 7) + tensors([(9, 5)], torch.bfloat16, 7)
    runs: list[list[Tensor]] = []
    for together in (True, False):
        p = tensors(sizes, torch.float32, 0) + tensors([(9, 5)], torch.bfloat16, 1)
        m = [torch.zeros_like(one) for one in p]
        for i in range(2):
            g = tensors(sizes, torch.float32, 2 + i) + tensors([(9, 5)], torch.bfloat16, 5)
            if together:
                assert step.foreach(p, g, m, 0.1 * (i + 1), (0.9, 0.99)) == [None] * 7
            else:
                for arguments in zip(p, g, m, strict=True):
                    lion(*arguments, 0.1 * (i + 1), (0.9, 0.99))
        for i in range(2):  # with tensors in the same places, as parameters are
            lr = 0.01 * (i + 1)
            versions = [one._version for one in p]
            if together:
                step.foreach(p, again, m, lr, (0.9, 0.99))
                assert all(one._version > before for one, before in zip(p, versions, strict=True))
            else:
                for arguments in zip(p, again, m, strict=True):
                    lion(*arguments, lr, (0.9, 0.99))
        runs.append(p + m)
    for a, e in zip(*runs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6 if a.dtype == torch.float32 else 0.02, atol=1e-6)
    if language == "triton":
        # Each step: one launch for a dtype, of a program for each 1024 elements of a tensor; and one for the tensors
        # that can be moved in vectors.
        assert launched == [3 + 1 + 1 + 1, 2, 1] * 4


def test_results_one_tensor_for_all_and_strided_ones(language: str) -> None:
    function: Any = pointwise(lambda x, scale, flag: (x * scale, x > scale if flag else x))
    xs = [*tensors([(5, 6), (1030,)], torch.float32, 0), torch.randn(4, 7, device=DEVICE).t()]
    scale = torch.tensor(0.5, device=DEVICE)
    for (product, mask), x in zip(function.foreach(xs, scale, True), xs, strict=True):
        assert torch.equal(product, x * scale)
        assert torch.equal(mask, x > scale)


def test_errors() -> None:
    step = pointwise(lion)
    p = tensors([(3,), (4,)], torch.float32, 0)
    with pytest.raises(ArgumentError, match=r"of one length; these are of \[1, 2\]"):
        step.foreach(p, p[:1], p, 0.1, (0.9, 0.99))
    with pytest.raises(ArgumentError, match="these are of none"):
        step.foreach(p[0], p[0], p[0], 0.1, (0.9, 0.99))
    with pytest.raises(AutogradError, match="no_grad"):
        pointwise(torch.neg).foreach([p[0].requires_grad_()])
