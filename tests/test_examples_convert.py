"""`examples/convert.py`: a converted network has the same spikes and gradients as the original."""

from __future__ import annotations

import pytest
import torch
from scripts import load

convert = load("examples/convert.py")


def check(device: str, backend: str) -> None:
    # 4 x 300 elements fill several blocks of the interpreter's kernels.
    runs = convert.compare(steps=20, neurons=300, seed=0, device=torch.device(device), backend=backend)
    assert len(runs) == 2
    for before, after in runs.values():
        assert torch.equal(before.spikes, after.spikes)
        assert 0.05 < before.spikes.mean() < 0.95
        assert before.grad_parameter.abs().min() > 0
        torch.testing.assert_close(after.grad_input, before.grad_input, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.grad_parameter, before.grad_parameter, rtol=1e-4, atol=1e-4)


@pytest.mark.long(all_but=["torch", "hop"])
@pytest.mark.parametrize("backend", ["torch", "hop", "triton"])
def test_spikes_and_gradients_are_unchanged(backend: str, interpreted: None) -> None:
    check("cpu", backend)


@pytest.mark.gpu
def test_spikes_and_gradients_are_unchanged_on_the_gpu() -> None:
    check("cuda", "triton")
