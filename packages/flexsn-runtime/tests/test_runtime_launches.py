"""Tests size classes, launch plans, checkpoints, and the devices that can run kernels."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from runtime_cores import STEP, assert_like_the_loop, random, soft_lif

from flexsn_runtime import (
    BackendUnavailableError,
    PointwiseProgram,
    ScanProgram,
    Specialization,
    _availability,
    flexsn_backward_ncl_bucket,
    prepare,
    scan,
    triton_interpreted,
    why_unavailable,
)
from flexsn_runtime.graphs._graph_step import GraphSpecialization
from flexsn_runtime.kernels._forward import ForwardScan, checkpoint_rows
from flexsn_runtime.plans._buckets import (
    LaunchConfig,
    StepCost,
    launch_plan,
    one_chunk,
    scattered,
    size_class,
    writable,
)
from flexsn_runtime.program import _arguments as arguments_module


@pytest.mark.parametrize(
    ("limit", "bucket"), [(0, 0), (1, 0), (2**12, 0), (2**17, 1), (2**20, 2), (2**23, 3), (2**40, 4)]
)
def test_buckets_end_at_their_limits(limit: int, bucket: int) -> None:
    assert flexsn_backward_ncl_bucket(limit) == bucket
    if 0 < bucket < 4 or limit == 2**12:
        assert flexsn_backward_ncl_bucket(limit + 1) == bucket + 1


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("ncl", [1, 2**15 + 1, 2**17 + 1, 2**18 + 1, 2**20 + 1])
@pytest.mark.parametrize("num_ops", [0, 1, 8, 40, 100, 1000, 10**5])
@pytest.mark.parametrize("inputs", [(1,), (2,), (4,), (8,), (4, 4), (2, 4), (2,) * 20, (8,) * 40])
def test_plans_can_be_generated(inputs: tuple[int, ...], ncl: int, num_ops: int, interpreted: bool) -> None:
    plan = launch_plan(ncl, StepCost(num_ops, inputs, (4, 4)), interpreted=interpreted)
    assert plan.forward.chunk % plan.backward.chunk == 0, "checkpoints are at the ends of the backward's chunks"
    for config in (plan.inference, plan.forward, plan.backward):
        assert config.chunk >= 1
        assert config.block & (config.block - 1) == 0
        elements = config.block // (32 * config.num_warps)
        assert elements >= 1 or interpreted
        if config.stages > 1:
            assert elements * min(inputs) >= 4 or interpreted, "bytes that are copied before their use"
        in_flight = (config.stages - 1) * config.chunk * config.block * sum(inputs)
        assert in_flight <= 2**16 or interpreted, "bytes of shared memory"
    apart = scattered(size_class(ncl), plan)
    assert (apart.forward.chunk, apart.backward.chunk) == (plan.forward.chunk, plan.backward.chunk)
    assert {c.block // (32 * c.num_warps) for c in (apart.inference, apart.forward, apart.backward)} == {1}


@pytest.mark.parametrize("chunk", [1, 2, 4, 16])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 15, 16, 17, 1000])
def test_checkpoint_rows_count_the_segments(steps: int, chunk: int) -> None:
    starts = [t for t in range(steps) if t % chunk == 0]
    assert checkpoint_rows(steps, chunk) == max(len(starts) - 1, 0)


def test_symbol_of_a_compiler_guards_only_its_size_class() -> None:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(5000, ConstantSource("ncl"))
    ncl = env.create_symintnode(symbol, hint=5000)
    x = torch.zeros(1)
    step = PointwiseProgram(soft_lif, 1, 1, 1).specialize_examples((x, x))
    assert isinstance(ncl, torch.SymInt)
    assert step.plan(ncl) == step.plan(5000)  # type: ignore[arg-type]
    assert not ncl.node.expr.is_number, "the size itself has not become a constant"


def test_devices_without_kernels_are_named() -> None:
    assert why_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is None
    reason = why_unavailable(torch.device("meta"))
    assert reason == "there are no compiled kernels for 'meta' tensors. Use backend='torch'."
    if triton_interpreted():
        gpu = why_unavailable(torch.device("cuda"))
        assert gpu is not None
        assert "Unset TRITON_INTERPRET" in gpu


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsn_runtime._availability._INSTALLED", False)
    assert why_unavailable(torch.device("cpu")) == (
        "Triton is not installed. Run `pip install triton` (Linux), or use backend='torch'."
    )


def test_unavailable_kernels_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "why_unavailable", lambda device, target: f"no {device.type} today.")
    with pytest.raises(BackendUnavailableError, match=r"compiled kernels cannot run: no cpu today\."):
        prepare(PointwiseProgram(soft_lif, 1, 1, 1), (torch.zeros(2, 3), torch.zeros(3)))


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_availability, "_INTERPRETED", False)
    with pytest.raises(BackendUnavailableError, match="on the CPU, and compiled kernels run on a GPU") as refused:
        prepare(PointwiseProgram(lambda x, v: (x + v, x + v), 1, 1, 1), (torch.zeros(2, 3), torch.zeros(3)))
    for remedy in (".to('cuda')", "backend='torch'", "TRITON_INTERPRET=1"):
        assert remedy in str(refused.value)


def generate_training_sources(steps: int) -> list[str]:
    """Returns the sources of the forward and the backward kernel of a training step over `steps` time steps."""
    x = random(steps, *STEP).requires_grad_()
    v = random(*STEP, seed=1).requires_grad_()
    assert_like_the_loop(soft_lif, 1, [x], [v])
    step, arguments = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (x, v))
    scan(step, arguments, state_seqs=False)[0].sum().backward()
    used = step.kernel_names  # kernels with other names belong to earlier tests with equal code
    kernels = [kernel.function for kernel in step._kernels.values()]
    return [inspect.getsource(function.fn) for function in kernels if function.__name__ in used]


@pytest.mark.long(all_but=["5"])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_short_sequence_is_one_chunk(steps: int) -> None:
    for source in generate_training_sources(steps):
        # The source has no loop, no remaining steps, and no conditions on a step: its loads and stores are unrolled.
        assert "chunks" not in source
        assert "left" not in source
        assert "for " not in source
        assert sum(line.lstrip().startswith("input_0_") and "load(" in line for line in source.splitlines()) == steps


@pytest.mark.parametrize(
    ("steps", "ops", "is_one"), [(7, 65, True), (7, 147, False), (8, 64, True), (8, 65, False), (9, 1, False)]
)
def test_one_chunk_holds_a_short_sequence_unless_its_ops_are_many(steps: int, ops: int, is_one: bool) -> None:
    config = LaunchConfig(chunk=4, block=64, num_warps=2, stages=3)
    expected = LaunchConfig(chunk=steps, block=64, num_warps=2) if is_one else None
    assert one_chunk(config, steps, ops) == expected


@pytest.mark.parametrize(("ops", "distance"), [(0, 8), (1, 8), (600, 8)])
def test_no_kernel_unrolls_a_million_steps(ops: int, distance: int) -> None:
    """Tests an interval that means that there are no checkpoints, and a step without ops."""
    assert writable(2**20, ops) == distance
    assert writable(16, ops) == (8 if ops == 600 else 16)


@pytest.mark.parametrize(("steps", "rows"), [(4, 0), (5, 0), (8, 0), (9, 2)])
def test_no_states_are_saved_for_a_backward_of_one_chunk(steps: int, rows: int) -> None:
    """Tests the interpreter's segments, which have 4 steps."""
    step, arguments = prepare(PointwiseProgram(soft_lif, 1, 1, 1), (random(steps, *STEP), random(*STEP, seed=1)))
    assert isinstance(step, Specialization)
    (states,) = ForwardScan(step, arguments, state_seqs=False, training=True)(arguments).checkpoints
    assert states.shape == (rows, *STEP)


@pytest.mark.long(all_but=["16", "19"])
@pytest.mark.parametrize("steps", [9, 12, 16, 19])
def test_kernels_for_one_length_have_no_code_for_other_lengths(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests kernels for a constant T. In the interpreter, chunks have 8 steps in the forward, and 4 in the backward."""
    monkeypatch.setattr(Specialization, "is_recorded", True, raising=False)
    monkeypatch.setattr(Specialization, "is_recorded", True, raising=False)
    monkeypatch.setattr(Specialization, "has_rest", GraphSpecialization.has_rest)
    forward, backward = generate_training_sources(steps)
    assert ("chunks * 8, T" in forward) == (steps % 8 > 0)
    assert ("left > 0" in backward) == (steps % 4 > 0)


def test_layout_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[ForwardScan] = []
    initialize = ForwardScan.__init__

    def record_scan(scan: ForwardScan, *positional: Any, **options: Any) -> None:
        scans.append(scan)
        initialize(scan, *positional, **options)

    monkeypatch.setattr(ForwardScan, "__init__", record_scan)
    program = ScanProgram(lambda x, v: (x + v, x - v), 1, 1, 1)
    for _ in range(3):
        step, arguments = prepare(program, (torch.rand(3, 70),))
        scan(step, arguments, state_seqs=False)
    assert len(scans) == 1
