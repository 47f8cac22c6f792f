"""Gradients of the compiled scan with respect to each input, state and captured tensor, compared with finite
differences in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from scan_cores import CASES, Case, Spike, problem, soft_spike
from torch import Tensor

from flexsn_runtime import LaunchConfig, ScanProgram, Specialization, TargetName, prepare, scan
from flexsn_runtime.plans._segments import SegmentRule, using_segments


def _make_exponential(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    tau, sharpness = parameters

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        upswing = sharpness * torch.exp((v - 0.8) / (1.0 + sharpness * sharpness))
        h = v + (x - v + upswing) / (1.0 + tau * tau)
        s = spike(h - 1.0)
        return s, s * -0.1 + (1.0 - s) * h

    return core


def _make_scaled(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    (k,) = parameters

    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(k * (v + (x - v) / 2.0))
        s = spike(h - 1.0)
        return s, (h - s) / (1.0 + k.square())

    return core


def _make_delayed(spike: Spike, parameters: list[Tensor]) -> Callable[..., Any]:
    beta, threshold = parameters

    def core(x: Tensor, v: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.sigmoid(beta) * v + x - last * threshold
        s = spike(h - threshold)
        return s, h, s

    return core


# Twelve cases. Their parameters are scalars, or have one element per channel, per sample, or per neuron.
SMOOTH = (
    *(case for case in CASES if case.smooth),
    Case("eif", 1, 1, 1, _make_exponential, lambda step: [(), step[-1:]]),
    Case("klif", 1, 1, 1, _make_scaled, lambda step: [(step[0], 1)]),
    Case("delayed_reset", 1, 2, 1, _make_delayed, lambda step: [step, ()]),
)
cases = pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)


def test_there_are_twelve_cases() -> None:
    assert len({case.name for case in SMOOTH}) >= 12


def check_gradients(
    case: Case,
    device: str,
    steps: int,
    step: tuple[int, ...],
    *,
    fast: bool,
    state_seqs: bool,
    on_cpu: TargetName = "triton",
    rule: SegmentRule | None = None,
) -> bool:
    p = problem(case, steps, step, dtype=torch.float64, device=device, spike=soft_spike)
    program = ScanProgram(p.core, *p.counts, on_cpu=on_cpu)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        with using_segments(rule):
            return scan(*prepare(program, leaves), state_seqs=state_seqs)

    # Captured tensors become arguments, in the order in which the core reads them.
    function(*p.inputs, *p.states)
    lifted = program.lifted()
    assert {id(t) for t in lifted} == {id(t) for t in p.parameters}
    with using_segments(rule):  # autograd may run the backward in another thread
        return torch.autograd.gradcheck(
            function, (*p.inputs, *p.states, *lifted), fast_mode=fast, check_undefined_grad=False
        )


@pytest.fixture
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets blocks of 4 elements and chunks of 2 steps, so that small tests have several blocks and chunks."""
    plan = Specialization.plan

    def use_small_launches(self: Specialization, ncl: int) -> Any:
        original = plan(self, ncl)
        launches = {f.name: getattr(original, f.name) for f in fields(original)}
        launches = {name: replace(v, block=4, chunk=2) for name, v in launches.items() if isinstance(v, LaunchConfig)}
        assert launches
        return replace(original, **launches)

    monkeypatch.setattr(Specialization, "plan", use_small_launches)


@pytest.mark.long(all_but=["plif_channel"])
@cases
def test_interpreted_gradients_equal_finite_differences(case: Case, interpreted: None, small_launches: None) -> None:
    # The 6 elements are one full block of 4 elements and a partial block. The 3 steps are one full chunk of 2 steps and
    # a partial chunk.
    assert check_gradients(case, "cpu", 3, (2, 3), fast=False, state_seqs=False)


@pytest.mark.long(all_but=["plif_channel"])
@cases
def test_cpp_gradients_equal_finite_differences(case: Case, compiler: None, small_launches: None) -> None:
    assert check_gradients(case, "cpu", 3, (2, 3), fast=False, state_seqs=False, on_cpu="cpp")


# Each segment has 2 chunks. One segment has one more step.
SEGMENTS = SegmentRule(elements=6 * 5, largest=6, steps=4, fewest=2, warm_up=2)


@pytest.mark.long
@cases
def test_segmented_gradients_equal_finite_differences(case: Case, compiler: None, small_launches: None) -> None:
    assert check_gradients(case, "cpu", 21, (2, 3), fast=False, state_seqs=False, on_cpu="cpp", rule=SEGMENTS)


@cases
@pytest.mark.gpu
def test_segmented_gradients_equal_finite_differences_on_the_gpu(case: Case) -> None:
    rule = SegmentRule(elements=33 * 5, largest=33, steps=8, fewest=2, warm_up=8)
    assert check_gradients(case, "cuda", 42, (3, 11), fast=False, state_seqs=True, rule=rule)


@cases
@pytest.mark.gpu
def test_gradients_equal_finite_differences_on_the_gpu(case: Case) -> None:
    # The 33 elements are a block of 32 elements and one more element. The 18 steps are two chunks of 8 steps in the
    # backward, or one chunk of 16 steps in the forward, and two more steps.
    assert check_gradients(case, "cuda", 18, (3, 11), fast=False, state_seqs=False)


@cases
@pytest.mark.gpu
@pytest.mark.parametrize("step", [(613, 217), (1001, 1501)], ids=str)
def test_projected_gradients_equal_finite_differences_on_the_gpu(case: Case, step: tuple[int, ...]) -> None:
    """Checks random projections of the gradients in other size classes, which have too many elements to check each
    element.
    """
    assert check_gradients(case, "cuda", 6, step, fast=True, state_seqs=True)
