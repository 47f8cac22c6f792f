"""Rows of the table of `benchmarks/functions.py`: typical functions run in `pointwise`, compared with eager mode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import functions
from function_catalog import ROWS_BY_NAME, Row, rows

# For each function that `pointwise` refuses: words that the error contains.
REFUSED = {"complex_rotation": "two tensors"}
KINDS = {"activation", "gated, cells", "loss", "optimizer step", "quantiser", "tone curve", "ODE", "statistics"}


def test_catalog_has_functions_of_all_kinds() -> None:
    assert {row.kind for row in rows()} == KINDS
    assert len(rows()) >= 83
    assert len(REFUSED) <= (1.0 - functions.NEEDED) * len(rows())


@pytest.mark.long(all_but=["adamw", "rotary_embedding"])
@pytest.mark.parametrize("row", [row for row in rows() if row.name not in REFUSED], ids=lambda row: row.name)
def test_function_works_in_all_dtypes(row: Row) -> None:
    computations = [functions.values, *([functions.gradients] if row.gradient else [])]
    outcomes = {(c.__name__, d): functions.check(row, d, c) for c in computations for d in functions.DTYPES}
    assert {key: outcome for key, outcome in outcomes.items() if not outcome.works} == {}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_give_advice(name: str) -> None:
    outcome = functions.check(ROWS_BY_NAME[name], torch.float32, functions.values)
    assert outcome.verdict == "refused"
    assert REFUSED[name] in outcome.why


def test_wrong_results_are_detected() -> None:
    expected = torch.tensor([1.0, 2.0])
    exact = expected.double()
    assert functions.judge(expected, expected, exact) == ""
    assert functions.judge(expected, torch.tensor([1.0, 2.1]), exact) == "at (1,) 2.0999999046325684, not 2.0"
    assert "float64" in functions.judge(expected, exact, exact)
