"""Functions that `test_nn_flexsn.py` sends to another process. The other process imports them by name."""

from __future__ import annotations

from torch import Tensor

from flexsn_nn import FlexSN


def soft_lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = (h - 0.25).clamp(0.0, 1.0)
    return s, h * (1.0 - s)


def run_in_child(layer: FlexSN, x: Tensor) -> Tensor:
    result = layer(x)
    assert isinstance(result, Tensor)
    return result.detach().cpu()
