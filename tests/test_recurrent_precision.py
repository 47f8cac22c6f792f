"""PyTorch's two interfaces for the precision of float32 products. Recurrent steps and exact products read both
interfaces.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexsn_nn import RLIF
from flexsn_runtime import float32_precision


@pytest.fixture(autouse=True)
def restore_settings() -> Iterator[None]:
    """Restores PyTorch's settings of precision after each test."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_older_interface_sets_the_precision(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    assert float32_precision() == precision


@pytest.mark.parametrize(("setting", "precision"), [("ieee", "highest"), ("tf32", "high")])
def test_newer_interface_sets_the_precision(setting: str, precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = setting
    assert float32_precision() == precision


@pytest.mark.usefixtures("interpreted")
def test_recurrent_steps_run_after_the_newer_interface() -> None:
    neuron = RLIF(6, backend="triton")
    for setting in ("tf32", "ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = setting
        neuron.reset()
        x = torch.rand(3, 2, 6, requires_grad=True)
        assert torch.autograd.grad(neuron(x).sum(), x)[0].shape == x.shape
