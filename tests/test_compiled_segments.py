"""Compiled graphs of long sequences. Their scans run in segments of time, which are chosen at run time, as in eager
mode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scan_cores import CASES, Case, Problem, problem
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import flexsn_hop.operator._operator as operator
from flexsn_hop import flex_sn_scan, flex_sn_scan_final_state, register_scan_lowering
from flexsn_nn.neuron import LIF
from flexsn_runtime import KernelLowering, PointwiseProgram, TargetName, prepare, scan
from flexsn_runtime._recent import Recent
from flexsn_runtime.graphs import _graph_step, _scan_op
from flexsn_runtime.graphs._graph_step import GraphSpecialization
from flexsn_runtime.plans._segments import SegmentRule, using_segments

STEPS, STEP = 75, (3, 200)
RULE = SegmentRule(elements=5 * 600, largest=600, steps=8, fewest=2, warm_up=12, longest=16)
RUNS: dict[bool, Callable[..., tuple[Tensor, ...]]] = {True: flex_sn_scan, False: flex_sn_scan_final_state}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Recent[GraphSpecialization]:
    """Returns the cache of the steps that operators have run. At the start of a test, the cache is empty."""
    cached: Recent[GraphSpecialization] = Recent()
    monkeypatch.setattr(_scan_op, "_elementwise_steps", cached)
    return cached


@pytest.fixture(params=["triton", "cpp"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TargetName:
    """Returns the language of the kernels. Kernels replace the operator's loops, as Inductor would do."""
    request.getfixturevalue("interpreted" if request.param == "triton" else "compiler")
    target: TargetName = request.param
    lowering = KernelLowering(on_cpu=target)
    monkeypatch.setattr("flexsn_hop.lowering._lowering._registered", [])
    register_scan_lowering(lowering)
    monkeypatch.setattr(operator, "forward_loop", lambda *args: tuple(lowering.forward(*args)))
    monkeypatch.setattr(operator, "backward_loop", lambda *args: tuple(lowering.backward(*args)))
    return target


def join_kernel_names(steps: Recent[GraphSpecialization]) -> str:
    return " ".join(name for step in steps.values() for name in step.kernel_names)


def differentiate(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    weighted = [r * (torch.arange(r.numel(), device=r.device) % 5 - 2).reshape(r.shape) for r in results]
    loss = torch.stack([w.sum() for w in weighted]).sum()
    return [r.detach() for r in results], list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def run_serially(p: Problem, language: TargetName, *, state_seqs: bool) -> tuple[list[Tensor], list[Tensor]]:
    with using_segments(None):
        step, arguments = prepare(PointwiseProgram(p.core, *p.counts, on_cpu=language), (*p.inputs, *p.states))
        return differentiate(scan(step, arguments, state_seqs=state_seqs), p.leaves)


def check(actual: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]) -> None:
    for actual_value, expected_value in zip(actual[0], expected[0], strict=True):
        assert torch.equal(actual_value, expected_value)
    for actual_value, expected_value in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(
            actual_value, expected_value, rtol=0.0, atol=1e-12 * float(expected_value.abs().max()) + 1e-300
        )


@pytest.mark.long(all_but=["cpp-plif_channel-sequence", "triton-lif_hard-final"])
@pytest.mark.parametrize("state_seqs", RUNS, ids=lambda seqs: "sequence" if seqs else "final")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_equal_serial_kernels(
    case: Case, state_seqs: bool, language: TargetName, steps: Recent[GraphSpecialization]
) -> None:
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    run = torch.compile(partial(RUNS[state_seqs], p.core, *p.counts), fullgraph=True, backend="aot_eager")
    with using_segments(RULE):
        results = differentiate(run(*p.inputs, *p.states), p.leaves)
    assert "_forward_guess" in join_kernel_names(steps)
    assert "_backward_maps" in join_kernel_names(steps)
    check(results, run_serially(p, language, state_seqs=state_seqs))


@pytest.mark.long(all_but=["cpp-23"])
@pytest.mark.parametrize("interval", [23, 128])
def test_results_do_not_depend_on_the_checkpoint_distance(
    interval: int, language: TargetName, steps: Recent[GraphSpecialization], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks results for inputs in permuted memory order. One distance of the checkpoints is larger than the distance
    that kernels use. The other distance exceeds the length of the sequence, so there are no checkpoints.
    """
    monkeypatch.setattr(KernelLowering, "checkpoint_interval", lambda *_: interval)
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    p.inputs[0] = p.inputs[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    run = torch.compile(partial(flex_sn_scan, p.core, *p.counts), fullgraph=True, backend="aot_eager")
    with using_segments(RULE):
        results = differentiate(run(*p.inputs, *p.states), p.leaves)
    assert "_forward_guess" in join_kernel_names(steps)
    assert "_backward_maps" in join_kernel_names(steps)
    check(results, run_serially(p, language, state_seqs=True))


def forgetful(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = 0.0625 * v + x
    s = (h >= 1.0).to(x.dtype)
    return s, h * (1.0 - s)


@pytest.mark.long(all_but=["cpp"])
def test_warm_up_is_learned_across_calls(language: TargetName, steps: Recent[GraphSpecialization]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(STEPS, *STEP, generator=generator), torch.randn(STEP, generator=generator)
    run = torch.compile(partial(flex_sn_scan_final_state, forgetful, 1, 1, 1), fullgraph=True, backend="aot_eager")
    with using_segments(None):
        expected = scan(*prepare(PointwiseProgram(forgetful, 1, 1, 1, on_cpu=language), (x, v)), state_seqs=False)
    repaired = []
    with using_segments(replace(RULE, warm_up=4)), torch.no_grad():
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(x, v), expected, strict=True))
            ((speculation,),) = [step.speculations.values() for step in steps.values()]
            repaired.append(speculation.last.elements)
    assert repaired[0] > 0
    assert repaired[-1] == 0


@pytest.mark.long(all_but=["cpp-4"])
@pytest.mark.parametrize("warm_up", [4, 16])
def test_ahead_of_time_programs_need_no_operator(
    warm_up: int, language: TargetName, steps: Recent[GraphSpecialization], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the forward of an ahead-of-time program runs in segments for any warm-up, and that the backward is
    serial.
    """
    serial_steps: Recent[GraphSpecialization] = Recent()
    monkeypatch.setattr(_graph_step, "_specializations", serial_steps)
    monkeypatch.setattr("flexsn_runtime.graphs._scan_lowering.is_ahead_of_time", lambda: True)
    (case,) = [case for case in CASES if case.name == "lif_hard"]
    p = problem(case, STEPS, STEP, dtype=torch.float64)
    run = torch.compile(partial(flex_sn_scan_final_state, p.core, *p.counts), fullgraph=True, backend="aot_eager")
    with using_segments(replace(RULE, longest=2 * warm_up)):
        results = differentiate(run(*p.inputs, *p.states), p.leaves)
    assert not list(steps.values())
    assert "_forward_guess" in join_kernel_names(serial_steps)
    assert "_backward_maps" not in join_kernel_names(serial_steps)
    check(results, run_serially(p, language, state_seqs=False))


@pytest.mark.long(all_but=["cpp"])
def test_forward_with_lengths_is_serial(language: TargetName, steps: Recent[GraphSpecialization]) -> None:
    """Checks that the forward with lengths is serial. Lengths are a mask in compiled graphs, and all guesses after the
    end of a sequence would be wrong.
    """
    neuron = LIF(backend="hop")
    lengths = torch.tensor([STEPS, 31, 0])
    run = torch.compile(lambda x: neuron.step(x, lengths=lengths)[0], fullgraph=True, backend="aot_eager")
    x = torch.randn(STEPS, *STEP, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with using_segments(RULE):
        results = differentiate_call(run, x)
    assert "_forward_guess" not in join_kernel_names(steps)
    assert "_backward_maps" in join_kernel_names(steps)
    with using_segments(None):
        serial = LIF(backend=language)
        expected = differentiate_call(lambda x: serial(x, lengths=lengths), x)
    assert torch.equal(results[0][0], expected[0][0])
    torch.testing.assert_close(results[1], expected[1], rtol=1e-5, atol=1e-6)


def differentiate_call(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return differentiate([run(x)], [x])


@pytest.mark.usefixtures("compiler")
@pytest.mark.long(all_but=["False"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_calls_one_operator_per_direction(dynamic: bool, steps: Recent[GraphSpecialization]) -> None:
    neuron = LIF(backend="cpp")

    def network(x: Tensor) -> Tensor:
        zeros = torch.zeros(()).expand(x.shape[1:])
        spikes, _ = flex_sn_scan_final_state(forgetful, 1, 1, 1, 2.0 * torch.relu(x), zeros, zero_states=[True])
        result: Tensor = neuron.step(spikes + x)[0] * 0.5
        return result

    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(network, fullgraph=True, dynamic=dynamic, backend=counter)
    for length in (STEPS, STEPS + 6, 5) if dynamic else (STEPS,):  # a sequence of 5 steps has no segments
        x = torch.randn(length, *STEP, generator=torch.Generator().manual_seed(length)).requires_grad_()
        with using_segments(RULE):
            if length == STEPS:
                results, codes = run_and_get_code(differentiate_call, run, x)
                assert [code.count("run_scan.default(") for code in codes] == [2, 1]
            else:
                results = differentiate_call(run, x)
        assert counter.frame_count == 1
        with using_segments(None):
            expected = differentiate_call(network, x)
        assert torch.equal(results[0][0], expected[0][0])
        torch.testing.assert_close(results[1], expected[1], rtol=1e-5, atol=1e-6)
    assert join_kernel_names(steps).count("_forward_guess") == 2
    assert join_kernel_names(steps).count("_backward_maps") == 1  # the loss does not depend on the first result
    with using_segments(RULE), torch.no_grad():
        assert torch.equal(run(x), expected[0][0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty graph as a warm-up
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["lif_hard", "plif_channel", "izhikevich"])
def test_results_equal_serial_kernels_on_a_gpu(name: str, mode: str, steps: Recent[GraphSpecialization]) -> None:
    (case,) = [case for case in CASES if case.name == name]
    p = problem(case, 3100, (3, 217), device="cuda")
    run = torch.compile(
        partial(flex_sn_scan_final_state, p.core, *p.counts, lowering="kernel"),
        fullgraph=True,
        dynamic=False,
        mode=mode,
    )
    expected = run_serially(p, "triton", state_seqs=False)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        results = differentiate(run(*p.inputs, *p.states), p.leaves)
        for actual_value, expected_value in zip(results[0], expected[0], strict=True):
            assert torch.equal(actual_value, expected_value)
        for actual_value, expected_value in zip(results[1], expected[1], strict=True):
            torch.testing.assert_close(
                actual_value, expected_value, rtol=0.0, atol=2e-5 * float(expected_value.abs().max())
            )
    assert "_forward_guess" in join_kernel_names(steps)
    assert "_backward_maps" in join_kernel_names(steps)


RUN_PACKAGE = """
import sys
import torch
run = torch._inductor.aoti_load_package("network.pt2")
torch.save([run(*arguments) for arguments in torch.load("sequences.pt")], "results.pt")
assert not [name for name in sys.modules if name.startswith("flexsn")]
"""


def run_alone(folder: Path, sequences: list[tuple[Tensor, ...]]) -> tuple[list[Any] | None, str]:
    """Runs the package in a process without this project. Returns the results, or `None` after an error, and the error
    output of the process.
    """
    torch.save(sequences, folder / "sequences.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", RUN_PACKAGE]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return (torch.load(folder / "results.pt") if process.returncode == 0 else None), process.stderr


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:No CUDA runtime is found:UserWarning")
# torch 2.11 itself raises this warning
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_packages_run_in_segments(device: str, dynamic: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Checks that a package runs in segments, in a process without this project. If T is dynamic, the number of
    segments is dynamic, too.
    """
    if device == "cpu":
        request.getfixturevalue("compiler")
    network = InOnePass().to(device)
    rule = SegmentRule(elements=2**20, largest=600, steps=16, fewest=2, most=5, warm_up=16, longest=32)
    v = torch.zeros(3, 8, device=device)

    def sequence(length: int) -> Tensor:
        return torch.randn(length, 3, 8, generator=torch.Generator().manual_seed(length)).to(device)

    shapes = {"x": {0: torch.export.Dim("T", min=2)}, "v": None} if dynamic else None
    with torch.no_grad(), using_segments(rule):
        exported = torch.export.export(network, (sequence(200), v), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "network.pt2"))
    with zipfile.ZipFile(package) as files:
        source = "".join(files.read(name).decode() for name in files.namelist() if name.endswith(".cpp"))
    assert "repair" in source
    lengths = (200, 1000, 9, 2) if dynamic else (200,)
    actual, error = run_alone(tmp_path, [(sequence(length), v) for length in lengths])
    if actual is None and device == "cuda":
        plain = torch.export.export(nn.ReLU(), (v,))
        torch._inductor.aoti_compile_and_package(plain, package_path=str(tmp_path / "network.pt2"))
        if run_alone(tmp_path, [(v,)])[0] is None:
            pytest.skip("this version of torch loads no package, not even the package of a ReLU")
    assert actual is not None, error
    with torch.no_grad(), using_segments(None):
        for length, results in zip(lengths, actual, strict=True):
            for actual_value, expected_value in zip(results, network(sequence(length), v), strict=True):
                assert torch.equal(actual_value, expected_value)


class InOnePass(nn.Module):
    """A network that maps a sequence `[T, B, N]` and an initial state to spikes and the final state."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = LIF()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        spikes, (v,) = self.neuron.step(2.0 * x, (v,))
        assert isinstance(spikes, Tensor)
        return spikes, v
