"""Scan kernels of every test core, compiled for GPUs that are not present. Their states must stay in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scan_cores import CASES, Case, problem
from torch import Tensor

from flexsn_codegen import TRITON, KernelSource, OfflineJob, compile_offline
from flexsn_nn import FlexSN, surrogate
from flexsn_nn.random import bernoulli_like, normal_like, uniform_like
from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime.kernels import _backward, _forward
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, launch_plan
from flexsn_runtime.plans._segments import SegmentRule, using_segments
from flexsn_runtime.segments import _kernels
from flexsn_runtime.step._pointwise_step import Specialization

TARGETS = ("sm_80", "sm_90", "gfx942")
# Every core is compiled with the launch plan of large steps. Only one core on one target is compiled with the plan of
# small steps, because this plan has more stages and takes several times as long to compile.
LARGE, SMALL = 2**23, 2**13
SMALL_CASE = ("lif_hard", "sm_90")
# Limit of the shared memory of a program, on the target with the least shared memory.
SHARED_BYTES = 64 * 1024


def record_kernels(size: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, OfflineJob]:
    """Returns a dictionary that records the kernels of later scans by direction or purpose. The kernels are those that
    the runtime would launch on a GPU for `size` elements.
    """
    jobs: dict[str, OfflineJob] = {}

    class Recorder:
        """A launch that records the kernel and runs nothing."""

        is_compiled = True
        programs = 1
        allocator = staticmethod(allocator)

        def __init__(self, kernel: CompiledKernel, sizes: object, config: LaunchConfig, device: object) -> None:
            self._kernel, self._config = kernel, config

        def __call__(self, tensors: Sequence[Tensor]) -> None:
            kernel: KernelSource = self._kernel.function.source
            dtypes = [t.dtype for t in tensors]
            job = OfflineJob(kernel, TARGETS[0], dtypes, self._config.block, self._config.num_warps)
            for purpose in (
                "forward_guess",
                "forward_repair",
                "backward_maps",
                "backward_carried",
                "backward_segments",
            ):
                if purpose in kernel.name:
                    jobs[purpose] = job
                    return
            jobs["backward" if "_backward_" in kernel.name else "forward"] = job

    def plan(step: Specialization, ncl: int) -> LaunchPlan:
        return launch_plan(size, step.cost, interpreted=False)

    monkeypatch.setattr(Specialization, "plan", plan)
    monkeypatch.setattr(TRITON, "compile", lambda kernel: SimpleNamespace(__name__=kernel.name, source=kernel))
    monkeypatch.setattr(_forward, "launch", Recorder)
    monkeypatch.setattr(_backward, "launch", Recorder)
    monkeypatch.setattr(_kernels, "launch", Recorder)
    return jobs


def record_scan(
    case: Case,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    rule: SegmentRule | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, OfflineJob]:
    """Returns the kernels of a scan: the forward with checkpoints, and the backward.

    Args:
        rule: rule for segments. With a rule, the result also contains the kernels of segments, by their purposes.
    """
    jobs = record_kernels(size, monkeypatch)
    p = problem(case, 3 if rule is None else 128, (8, 16), dtype=dtype)
    with using_segments(rule):
        step, arguments = prepare(ScanProgram(p.core, *p.counts), (*p.inputs, *p.states))
        results = scan(step, arguments, state_seqs=False)
        torch.autograd.grad(results, p.leaves, [torch.ones_like(r) for r in results])
    if rule is None:
        assert sorted(jobs) == ["backward", "forward"]
    return jobs


SEGMENT_KERNELS = ("backward_carried", "backward_maps", "backward_segments", "forward_guess", "forward_repair")


@pytest.mark.long(all_but=["lif_hard-float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_segments_compile_without_spills(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, interpreted: None
) -> None:
    rule = SegmentRule(elements=8 * 128, largest=128, steps=16, warm_up=16)
    jobs = record_scan(case, SMALL, monkeypatch, rule, dtype)
    assert sorted(jobs) == list(SEGMENT_KERNELS)
    targets = [replace(jobs[name], target="sm_90") for name in SEGMENT_KERNELS]
    for name, use in zip(SEGMENT_KERNELS, compile_offline(targets), strict=True):
        print(f"{case.name}, {dtype}, {name}: {use}")  # visible with `pytest -s`
        assert use.spilled_bytes == use.local_bytes == 0, name
        assert use.registers <= 255, name
        assert use.shared_bytes <= SHARED_BYTES, name


@pytest.mark.long(all_but=["1"])
@pytest.mark.parametrize("targets_per_core", [1, len(TARGETS)])
def test_every_core_compiles_without_spills(
    targets_per_core: int, monkeypatch: pytest.MonkeyPatch, interpreted: None
) -> None:
    """Compiles each core for all targets, or for one target that alternates between cores."""
    jobs: dict[str, OfflineJob] = {}
    for i, case in enumerate(CASES):
        for direction, job in record_scan(case, LARGE, monkeypatch).items():
            for target in [TARGETS[(i + k) % len(TARGETS)] for k in range(targets_per_core)]:
                jobs[f"{case.name}, {direction}, size {LARGE}, {target}"] = replace(job, target=target)
        if case.name == SMALL_CASE[0]:
            for direction, job in record_scan(case, SMALL, monkeypatch).items():
                jobs[f"{case.name}, {direction}, size {SMALL}, {SMALL_CASE[1]}"] = replace(job, target=SMALL_CASE[1])
    assert len(jobs) == (len(CASES) * targets_per_core + 1) * 2
    assert {job.target for job in jobs.values()} == set(TARGETS)
    for name, use in zip(jobs, compile_offline(list(jobs.values())), strict=True):
        print(f"{name}: {use}")  # visible with `pytest -s`
        assert name.endswith(use.target)
        assert use.spilled_bytes == use.local_bytes == 0, name
        assert 0 < use.registers <= 255, name
        assert use.shared_bytes <= SHARED_BYTES, name
        assert len(use.binary) > 1000, name


@pytest.mark.long(all_but=["normal-sm_90"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("draw", [normal_like, uniform_like, bernoulli_like], ids=["normal", "uniform", "bernoulli"])
def test_random_numbers_compile_without_spills(
    draw: Callable[[Tensor], Tensor], target: str, monkeypatch: pytest.MonkeyPatch, interpreted: None
) -> None:
    """Checks that kernels that draw random numbers need at most 128 registers, so that enough warps can run."""
    spike = surrogate.Sigmoid()

    def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x + 0.2 * draw(x) - v) / 2.0
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    jobs = record_kernels(LARGE, monkeypatch)
    x = torch.rand(8, 4, 64, requires_grad=True)
    torch.autograd.grad(FlexSN(lif, 1, 1, 1, backend="triton")(x).sum(), x)
    assert sorted(jobs) == ["backward", "forward"]
    for use in compile_offline([replace(job, target=target) for job in jobs.values()]):
        assert use.spilled_bytes == use.local_bytes == 0
        assert use.registers <= 128
        assert use.shared_bytes <= SHARED_BYTES
