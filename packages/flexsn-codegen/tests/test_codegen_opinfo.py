"""A quick subset of `benchmarks/opinfo_table.py`: each elementwise op of PyTorch on one sample, in int32 and float32,
there with its gradient."""

from __future__ import annotations

import pytest
import torch
from codegen_opinfo import Outcome, check, check_gradient, is_differentiable, variant_name, variants

pytestmark = pytest.mark.xdist_group("opinfo")

COMPLEX_ONLY = ["imag", "nn.functional.silu.complex"]
Outcomes = dict[str, dict[str, Outcome]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    found: Outcomes = {}
    for info in variants():
        of_variant = found[variant_name(info)] = {}
        if torch.int32 in info.dtypes:
            of_variant["int32"] = check(info, torch.int32, samples=1, special=True)
        if is_differentiable(info, torch.float32):
            of_variant["gradient"] = check_gradient(info, torch.float32, samples=1, special=False)
        elif torch.float32 in info.dtypes:
            of_variant["float32"] = check(info, torch.float32, samples=1, special=False)
    return found


def ran(outcome: Outcome) -> bool:
    return bool(outcome.equal or outcome.close or outcome.refused)


def test_no_wrong_answer(outcomes: Outcomes) -> None:
    assert [(name, what, o.wrong) for name, found in outcomes.items() for what, o in found.items() if o.wrong] == []


def test_most_variants_are_supported(outcomes: Outcomes) -> None:
    refused = [name for name, found in outcomes.items() if any(o.refused for o in found.values())]
    assert len(outcomes) - len(refused) >= 190, refused


def test_every_variant_ran(outcomes: Outcomes) -> None:
    # The others take complex numbers alone.
    assert [name for name, found in outcomes.items() if not any(map(ran, found.values()))] == COMPLEX_ONLY


def test_every_differentiable_variant_ran_backward(outcomes: Outcomes) -> None:
    idle = [name for name, found in outcomes.items() if "gradient" in found and not ran(found["gradient"])]
    assert idle == ["chalf"]  # eager mode has no such gradient on the CPU either
