"""Step functions of every kind, with all surrogates, in four dtypes. Kernels are compared with the eager loop and with
autograd.

These tests cover each pair of a step function and a dtype, and each pair of a surrogate and a dtype.
`python benchmarks/steps_by_surrogate.py` runs all combinations and writes a table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_zoo import DTYPES, STEP_FUNCTIONS, Combination, check, combinations, compare, covering, label, surrogates
from torch import Tensor

from flexsn_hop import eager_scan
from flexsn_nn.surrogate import ATan
from flexsn_runtime import ScanProgram, prepare, scan

covered = pytest.mark.parametrize("combination", covering(), ids=label)


@pytest.mark.long(
    all_but=[
        "alif-StraightThrough-float32",
        "lif-SpikeRateEscape-bfloat16",
        "lif-Rect-float16",
        "lif-Erf-float64",
    ]
)
@covered
def test_kernels_equal_the_loop_in_the_interpreter(combination: Combination, interpreted: None) -> None:
    assert check(combination, compare(*combination), "cpu") == ""


@pytest.mark.long(all_but=["plif-PiecewiseLeakyReLU-float32", "lif-SpikeRateEscape-bfloat16"])
@covered
def test_kernels_in_cpp_equal_the_loop(combination: Combination, compiler: None) -> None:
    assert check(combination, compare(*combination, on_cpu="cpp"), "cpp") == ""


# On a GPU, only every second combination runs. Each step function and each surrogate occurs in two or three dtypes.
@pytest.mark.gpu
@pytest.mark.parametrize("combination", covering()[::2], ids=label)
def test_kernels_equal_the_loop_on_the_gpu(combination: Combination) -> None:
    assert check(combination, compare(*combination, device="cuda"), "cuda") == ""


def _use_scalars(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    spikes = (x > 0.3).to(x.dtype)
    return spikes, torch.where(x >= 0.28, 0.3, x), torch.fmod(x, 0.1), x**1.7, x**3, (10 * x) ** -2, v + x / 3


@pytest.mark.long(all_but=["*-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scalars_are_rounded_to_half_dtypes(dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    """Checks that scalars such as 0.3 are rounded to the dtype of the tensor. bfloat16 rounds 0.3 to 0.30078125, and
    eager mode compares with this rounded scalar.
    """
    if device == "cpu":
        request.getfixturevalue("interpreted")
    x = torch.linspace(0.25, 0.35, 512, dtype=torch.float64).to(device, dtype)[None]
    v = torch.zeros_like(x[0])
    results = scan(*prepare(ScanProgram(_use_scalars, 1, 1, 6), (x, v)), state_seqs=True)
    for i, (a, b) in enumerate(zip(results, eager_scan(_use_scalars, 1, 1, 6, x, v), strict=True)):
        assert torch.equal(a, b), i
    if dtype == torch.bfloat16:
        assert torch.equal(results[0], (x > 0.30078125).to(dtype))
        assert not torch.equal(results[0], (x.float() > 0.3).to(dtype))


def test_selection_covers_all_pairs_with_a_dtype() -> None:
    selection = covering()
    assert len(STEP_FUNCTIONS) >= len(surrogates()) >= 22  # otherwise, the selection would lack a surrogate
    assert len(combinations()) == len(STEP_FUNCTIONS) * len(surrogates()) * len(DTYPES)
    assert len(selection) == len(STEP_FUNCTIONS) * len(DTYPES)
    assert {(step.name, dtype) for step, _, dtype in selection} == {(s.name, d) for s in STEP_FUNCTIONS for d in DTYPES}
    assert {(spike, dtype) for _, spike, dtype in selection} == {(s, d) for s in surrogates() for d in DTYPES}
    assert len({(step.name, spike) for step, spike, _ in selection}) == len(selection)


def test_wrong_gradients_are_detected(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a difference is reported if the loop has a surrogate of another width."""
    step = STEP_FUNCTIONS[1]
    core = step.make(ATan(3.0))
    monkeypatch.setattr("step_zoo.eager_scan", lambda _, *arguments: eager_scan(core, *arguments))
    for dtype in DTYPES:
        combination = (step, ATan(2.0), dtype)
        assert check(combination, compare(*combination), "cpu").startswith("gradient: off by"), dtype


def test_wrong_results_are_detected(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a difference is reported if the results of the loop are larger by one or two eps."""

    def loop_with_error(*arguments: Any) -> tuple[Tensor, ...]:
        results = eager_scan(*arguments)
        return tuple(t * (1 + 1.5 * torch.finfo(t.dtype).eps) for t in results)

    monkeypatch.setattr("step_zoo.eager_scan", loop_with_error)
    combination = (STEP_FUNCTIONS[1], ATan(), torch.float32)
    assert "have other bits" in check(combination, compare(*combination), "cpu")
