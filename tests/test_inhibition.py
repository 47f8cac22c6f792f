"""Reductions of the neurons of a row in a step: kernels and a library's reductions, against the loop."""

from __future__ import annotations

import pytest
import torch
from inhibiting_cores import CELLS
from recurrent_cores import Cell, Dense, Powers
from test_recurrent import DEVICE, TARGETS, differentiated, made, run, sequences

from flexsn_runtime import TargetName

cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)


@pytest.mark.parametrize("target", TARGETS)
@cells
def test_results_and_gradients_are_those_of_the_loop(cell: type[Cell], target: TargetName) -> None:
    core = made(cell, 9, Dense(), torch.float64, soft=True)
    tensors = sequences(core, 5, 61, 9, dtype=torch.float64)
    expected, expected_gradients = differentiated(core, tensors, None)
    got, gradients = differentiated(core, tensors, target)
    for a, b in zip([*got, *gradients], [*expected, *expected_gradients], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
