"""Types of pointwise functions. mypy checks this file, and rejects wrong types and unused ignores."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import Tensor

from flexsn_codegen import pointwise
from flexsn_codegen.errors import SignatureError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scaled(x: Tensor, scale: float = 1.0, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    return x * scale, x + shift


@pointwise
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_types_of_arguments_and_results_equal_the_functions() -> None:
    x = torch.ones(3, device=DEVICE)
    fused = pointwise(scaled, autograd=True)
    assert_type(fused(x, 2.0, shift=3), tuple[Tensor, Tensor])
    assert_type(fused.into([torch.empty_like(x), torch.empty_like(x)], x), tuple[Tensor, Tensor])
    assert_type(fused.foreach([x, x]), list[tuple[Tensor, Tensor]])
    assert_type(doubled(x), Tensor)
    with pytest.raises(SignatureError):
        fused(x, scales=2.0)  # type: ignore[call-arg]
    with pytest.raises(SignatureError):
        doubled()  # type: ignore[call-arg]
