"""`examples/mixed_precision.py`: states have the chosen precision. A membrane with slow decay needs float32."""

from __future__ import annotations

import math

import pytest
import torch
from scripts import load, one_thread

mixed = load("examples/mixed_precision.py")
CPU = torch.device("cpu")


@pytest.mark.long(all_but=["autocast, eager"])
@one_thread()
@pytest.mark.parametrize("way", list(mixed.WAYS))
def test_network_learns_in_each_precision(way: str) -> None:
    autocast, precision = mixed.WAYS[way]
    result = mixed.train(autocast, precision, updates=30, seed=0, device=CPU)
    assert result.accuracy > 0.8
    assert result.losses[-1] < 0.2 * result.losses[0]
    is_float32 = not autocast or precision == "float32"
    assert result.state_dtype == (torch.float32 if is_float32 else torch.bfloat16)
    assert result.spike_dtype == (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.long(all_but=["torch"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slow_membrane_needs_float32(backend: str, interpreted: None) -> None:
    exact = 1 - math.exp(-2)
    assert mixed.slow_membrane("float32", torch.bfloat16, CPU, backend) == pytest.approx(exact, abs=1e-3)
    assert mixed.slow_membrane("eager", torch.bfloat16, CPU, backend) == 0.5
