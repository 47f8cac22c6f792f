"""A quick subset of `benchmarks/opinfo_table.py`: the elementwise ops of PyTorch in `pointwise` and in `FlexSN`.

Each variant of an op runs one sample in one dtype, and the dtypes alternate between variants. Every third variant also
computes gradients, and every fourth one also runs special values. Without `--long`, only one sixteenth of the variants
runs.
"""

from __future__ import annotations

import pytest
from opinfo import DIFFERENTIABLE, DTYPES, Outcome, check, is_differentiable, variant_name, variants

PARTS = 16
pytestmark = [pytest.mark.xdist_group("opinfo"), pytest.mark.long(all_but=["0"])]
Outcomes = dict[str, dict[str, Outcome]]


@pytest.fixture(scope="module", params=range(PARTS))
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    results: Outcomes = {}
    for i, info in enumerate(variants()):
        # A part consists of groups of 12 consecutive variants. Each group includes gradients and special values.
        if i // 12 % PARTS != request.param:
            continue
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes]
        differentiable_dtypes = [dtype for dtype in DIFFERENTIABLE if is_differentiable(info, dtype)]
        variant_outcomes = results[variant_name(info)] = {}
        if dtypes:
            dtype = dtypes[i % len(dtypes)]
            variant_outcomes["values"] = check(info, dtype, samples=1, special=i % 4 == 0, first=i % 5)
        if differentiable_dtypes and i % 3 == 0:
            dtype = differentiable_dtypes[i % len(differentiable_dtypes)]
            variant_outcomes["gradients"] = check(
                info, dtype, samples=1, special=i % 8 == 0, first=i % 5, gradient=True
            )
    return results


def list_outcomes(outcomes: Outcomes) -> list[Outcome]:
    return [outcome for variant_outcomes in outcomes.values() for outcome in variant_outcomes.values()]


def test_no_wrong_results_and_no_crashes(outcomes: Outcomes) -> None:
    assert [problem for o in list_outcomes(outcomes) for problem in (*o.wrong, *o.crashed)] == []


def test_pointwise_and_flexsn_agree(outcomes: Outcomes) -> None:
    assert [difference for o in list_outcomes(outcomes) for difference in o.apart] == []


def test_nearly_all_runs_pass(outcomes: Outcomes) -> None:
    passed = sum(o.equal + o.close for o in list_outcomes(outcomes))
    refused = {
        name: o.reason for name, variant_outcomes in outcomes.items() for o in variant_outcomes.values() if o.refused
    }
    # In the whole table, at least 95 % of the runs pass. In a part of the table, the share may be smaller.
    assert passed >= 0.9 * sum(o.runs for o in list_outcomes(outcomes)), refused


def test_every_variant_ran(outcomes: Outcomes) -> None:
    only_complex = {"nn.functional.silu.complex"}
    variants_without_runs = {
        name for name, variant_outcomes in outcomes.items() if not any(o.runs for o in variant_outcomes.values())
    }
    assert variants_without_runs == only_complex & outcomes.keys()
