"""The scan kernels of every test core compile for GPUs that are not there, and keep their states in registers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scan_cores import CASES, Case, problem
from torch import Tensor

from flexsn_codegen import TRITON, KernelSource, OfflineJob, ResourceUse, compile_offline
from flexsn_runtime import ScanProgram, prepare, scan
from flexsn_runtime.kernels import _backward, _forward
from flexsn_runtime.launches._kernel import CompiledKernel
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.plans._buckets import LaunchConfig, LaunchPlan, launch_plan
from flexsn_runtime.step._pointwise_step import Specialization

TARGETS = ("sm_80", "sm_90", "gfx942")
# Every core by the launch plan of large steps; that of small ones unrolls as much in more stages, and takes several
# times as long to compile: for one core on one target.
LARGE, SMALL = 2**23, 2**13
SMALL_CASE = ("lif_hard", "sm_90")
# Of a program, on the target that has least of it.
SHARED_BYTES = 64 * 1024


def recorded(case: Case, size: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, OfflineJob]:
    """The forward with checkpoints and the backward, as the runtime makes and launches them on a GPU."""
    jobs: dict[str, OfflineJob] = {}

    class Recorder:
        """In the place of a launch: notes the kernel, and runs nothing."""

        is_compiled = True
        programs = 1
        allocator = staticmethod(allocator)

        def __init__(self, kernel: CompiledKernel, sizes: object, config: LaunchConfig, device: object) -> None:
            self._kernel, self._config = kernel, config

        def __call__(self, tensors: Sequence[Tensor]) -> None:
            kernel: KernelSource = self._kernel.function.source
            dtypes = [t.dtype for t in tensors]
            job = OfflineJob(kernel, TARGETS[0], dtypes, self._config.block, self._config.num_warps)
            jobs["backward" if "_backward_" in kernel.name else "forward"] = job

    def plan(step: Specialization, ncl: int) -> LaunchPlan:
        return launch_plan(size, step.cost, interpreted=False)

    monkeypatch.setattr(Specialization, "plan", plan)
    monkeypatch.setattr(TRITON, "compile", lambda kernel: SimpleNamespace(__name__=kernel.name, source=kernel))
    monkeypatch.setattr(_forward, "launch", Recorder)
    monkeypatch.setattr(_backward, "launch", Recorder)
    p = problem(case, 3, (8, 16))
    step, arguments = prepare(ScanProgram(p.core, *p.counts), (*p.inputs, *p.states))
    results = scan(step, arguments, state_seqs=False)
    torch.autograd.grad(results, p.leaves, [torch.ones_like(r) for r in results])
    assert sorted(jobs) == ["backward", "forward"]
    return jobs


def compiled(jobs: Sequence[OfflineJob]) -> list[ResourceUse]:
    """In two processes, the jobs in turn."""
    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(compile_offline, (jobs[::2], jobs[1::2]))
    return [(even, odd)[i % 2][i // 2] for i in range(len(jobs))]


@pytest.mark.long(all_but=["1"])
@pytest.mark.parametrize("targets_each", [1, len(TARGETS)])
def test_every_core_compiles_without_spills(
    targets_each: int, monkeypatch: pytest.MonkeyPatch, interpreted: None
) -> None:
    """For one target after the other, or for every one."""
    jobs: dict[str, OfflineJob] = {}
    for i, case in enumerate(CASES):
        for direction, job in recorded(case, LARGE, monkeypatch).items():
            for target in [TARGETS[(i + k) % len(TARGETS)] for k in range(targets_each)]:
                jobs[f"{case.name}, {direction}, size {LARGE}, {target}"] = replace(job, target=target)
        if case.name == SMALL_CASE[0]:
            for direction, job in recorded(case, SMALL, monkeypatch).items():
                jobs[f"{case.name}, {direction}, size {SMALL}, {SMALL_CASE[1]}"] = replace(job, target=SMALL_CASE[1])
    assert len(jobs) == (len(CASES) * targets_each + 1) * 2
    assert {job.target for job in jobs.values()} == set(TARGETS)
    for name, use in zip(jobs, compiled(list(jobs.values())), strict=True):
        print(f"{name}: {use}")  # pytest -s shows them
        assert name.endswith(use.target)
        assert use.spilled_bytes == use.local_bytes == 0, name
        assert 0 < use.registers <= 255, name
        assert use.shared_bytes <= SHARED_BYTES, name
        assert len(use.binary) > 1000, name
