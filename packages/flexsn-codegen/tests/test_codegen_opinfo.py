"""A quick subset of `benchmarks/opinfo_table.py`: each elementwise op of PyTorch, one sample, two dtypes."""

from __future__ import annotations

import pytest
import torch
from codegen_opinfo import Outcome, check, variant_name, variants

COMPLEX_ONLY = ["imag", "nn.functional.silu.complex"]
Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return {
        variant_name(info): [
            check(info, dtype, samples=1, special=dtype == torch.int32)
            for dtype in (torch.float32, torch.int32)
            if dtype in info.dtypes
        ]
        for info in variants()
    }


def test_no_wrong_answer(outcomes: Outcomes) -> None:
    wrong = {name: o.wrong for name, found in outcomes.items() for o in found if o.wrong}
    assert wrong == {}


def test_most_variants_are_supported(outcomes: Outcomes) -> None:
    refused = [name for name, found in outcomes.items() if any(o.refused for o in found)]
    assert len(outcomes) - len(refused) >= 190, refused


def test_every_variant_ran(outcomes: Outcomes) -> None:
    # The others take complex numbers alone.
    idle = [name for name, found in outcomes.items() if not any(o.equal or o.close or o.refused for o in found)]
    assert idle == COMPLEX_ONLY
