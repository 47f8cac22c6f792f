"""Launch plans are measured, saved, and used by later programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime_cores import DEVICE, compiled, loop, random, soft_lif
from torch import Tensor

from flexsn_runtime import LaunchConfig, LaunchPlan, PointwiseProgram, prepare, tune
from flexsn_runtime.plans._buckets import fits
from flexsn_runtime.program import _autotune as autotune_module
from flexsn_runtime.program._autotune import candidates

STEP = (2, 3)
NCL = 6
X, V = random(5, *STEP), random(*STEP, seed=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    return tmp_path


def find_plan(program: PointwiseProgram) -> LaunchPlan:
    return prepare(program, (X, V))[0].plan(NCL)


class Timer:
    """Returns times without measuring them. Call number `best` returns the shortest time."""

    def __init__(self, best: int) -> None:
        self.best, self.count = best, 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.count += 1
        return abs(self.count - self.best)


def test_best_plan_is_used_later_and_in_other_processes(folder: Path) -> None:
    program = PointwiseProgram(soft_lif, 1, 1, 1)
    usual = find_plan(program)
    timer = Timer(best=2)
    best = tune(program, (X, V), timer=timer)
    assert best.inference == candidates(usual.inference)[1] != usual.inference
    # The search for each launch starts with the entry of the table. For the other launches, this entry was the best.
    assert (best.forward, best.backward) == (usual.forward, usual.backward)
    assert 10 <= timer.count <= 21
    assert find_plan(program) == best
    assert find_plan(PointwiseProgram(soft_lif, 1, 1, 1)) == best
    (file,) = folder.glob("launches_*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["key"]["elements"] >= NCL


def test_another_step_dtype_or_size_class_has_another_plan() -> None:
    step, _ = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (X, V))
    first = step.plan(NCL)
    step.keep_plan(NCL, replace(first, inference=replace(first.inference, block=256)))

    def other(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x + v, x - v

    usual = find_plan(PointwiseProgram(other, 1, 1, 1))
    assert usual.inference != find_plan(PointwiseProgram(soft_lif, 1, 1, 1)).inference
    step, _ = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (X.double(), V.double()))
    assert step.plan(NCL) == usual
    step, _ = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (X, V))
    assert step.plan(2**22) != step.plan(NCL)


@pytest.mark.long(all_but=["17"])
@pytest.mark.parametrize("best", [2, 12, 17])
def test_results_and_pending_backwards_do_not_depend_on_the_plan(best: int) -> None:
    program = PointwiseProgram(soft_lif, 1, 1, 1)
    x, v = random(9, 600).requires_grad_(), random(600, seed=1).requires_grad_()
    before = compiled(program, 1, [x], [v])[0]
    usual = prepare(program, (x, v))[0].plan(600)
    assert tune(program, (x, v), timer=Timer(best)) != usual
    after = compiled(program, 1, [x], [v])[0]
    expected = loop(soft_lif, 1, [x], [v])[0]
    assert torch.equal(before, expected)
    assert torch.equal(after, expected)
    expected_gradients = torch.autograd.grad(expected.sum(), [x, v])
    for output in (before, after):
        for gradient, reference in zip(torch.autograd.grad(output.sum(), [x, v]), expected_gradients, strict=True):
            torch.testing.assert_close(gradient, reference)


def test_plan_with_too_much_shared_memory_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    real = autotune_module._prepare_launch
    usual = find_plan(PointwiseProgram(soft_lif, 1, 1, 1))

    def launch(step: object, arguments: object, plan: LaunchPlan, name: str) -> Callable[[], object]:
        if plan != usual:

            def fail() -> None:
                raise errors.OutOfResources(2**20, 2**16, "shared memory")

            return fail
        return real(step, arguments, plan, name)  # type: ignore[arg-type]

    monkeypatch.setattr(autotune_module, "_prepare_launch", launch)
    assert tune(PointwiseProgram(soft_lif, 1, 1, 1), (X, V), timer=Timer(best=100)) == usual


@pytest.mark.long(all_but=["text", "another key", "cut off", "no power of two"])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"block": 256', '"block": 300'),
        lambda text: text.replace('"chunk": 4', '"chunk": 2'),
        lambda text: text.replace('"block": 256', '"block": "256"'),
        lambda text: text.replace('"elements"', '"element"'),
        lambda text: text.replace('"stages"', '"stage"'),
        lambda text: text.replace('"key"', '"keys"'),
    ],
    ids=["cut off", "a list", "no power of two", "other checkpoints", "text", "another key", "other fields", "no key"],
)
def test_foreign_files_are_not_used(change: Callable[[str], str], folder: Path) -> None:
    step, _ = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (X, V))
    usual = step.plan(NCL)
    better = replace(usual, inference=replace(usual.inference, block=256))
    step.keep_plan(NCL, better)
    assert find_plan(PointwiseProgram(soft_lif, 1, 1, 1)) == better
    (file,) = folder.glob("launches_*.json")
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    assert find_plan(PointwiseProgram(soft_lif, 1, 1, 1)) == usual


def test_candidates_are_few_and_compile() -> None:
    for config in (LaunchConfig(8, 32, 1, 6), LaunchConfig(4, 512, 4), LaunchConfig(1, 1024, 8, 3)):
        plan = LaunchPlan(config, config, config)
        configs = candidates(config)
        assert configs[0] == config
        assert 3 < len(set(configs)) == len(configs) <= 7
        assert all(fits(replace(plan, inference=candidate), plan) for candidate in configs)


@pytest.mark.gpu
def test_plan_is_measured_on_the_gpu() -> None:
    program, x = PointwiseProgram(soft_lif, 1, 1, 1), torch.randn(64, 2**15, device=DEVICE)
    plan = tune(program, (x,))
    step, _ = prepare(program, (x,))
    assert step.plan(2**15) == plan
    torch.testing.assert_close(compiled(program, 1, [x], [])[0], loop(soft_lif, 1, [x], [torch.zeros_like(x[0])])[0])
