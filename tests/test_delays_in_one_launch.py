"""Delayed states, which equal another state some steps earlier and share its memory. Their steps run in one launch, or
step by step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent_cores import Late, Powers
from test_one_launch import SetExchange, launches, set_exchange  # noqa: F401  # fixtures
from test_recurrent import DEVICE, TARGETS, differentiate, make_core, make_sequences, run

from flexsn_graph import Phase, Port, Role
from flexsn_nn import LIF, Recurrent
from flexsn_nn.layer import Delay
from flexsn_runtime import RecurrentSpecialization, ScanProgram, TargetName


def test_delayed_states_are_detected() -> None:
    core = make_core(Late, 5, Powers())
    program = ScanProgram(core, 1, core.num_states, 1, on_cpu=TARGETS[-1])
    step, _ = program.specialize(*split_states(make_sequences(core, 2, 3, 5)))
    assert isinstance(step, RecurrentSpecialization)
    states = [Port(Role.STATE, i) for i in range(core.num_states)]
    first, delay_1, delay_2, _, delay_3, _ = states
    assert step.trace.forward.shifts == {delay_1: (first, 1), delay_2: (first, 2), delay_3: (first, 3)}


def split_states(tensors: Any) -> tuple[Any, Any]:
    return tensors[:1], tensors[1:]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("state_seqs", [False, True])
@pytest.mark.long(all_but=["False-7-*"])
def test_delays_run_step_by_step(
    state_seqs: bool, num_steps: int, target: TargetName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXSN_ONE_LAUNCH", "0")
    check(
        num_steps, 3 if num_steps > 1 else 17, 5, target, state_seqs=state_seqs
    )  # 3 samples would not spike in one step


@pytest.mark.parametrize("is_exchanged", [False, True])
@pytest.mark.parametrize("num_steps", [2, 7])
@pytest.mark.long(all_but=["7-*"])
def test_cores_with_delays_run_in_one_launch(
    num_steps: int,
    is_exchanged: bool,
    set_exchange: SetExchange,  # noqa: F811
    launches: list[str],  # noqa: F811
) -> None:
    set_exchange(is_exchanged)
    check(num_steps, 17, 19, "triton")
    assert launches == ["one launch"] * 3


def check(num_steps: int, batch: int, size: int, target: TargetName, *, state_seqs: bool = False) -> None:
    core = make_core(Late, size, Powers())
    tensors = make_sequences(core, num_steps, batch, size)
    with torch.no_grad():
        for ours, theirs in zip(run(core, tensors, target), run(core, tensors, None), strict=True):
            assert torch.equal(ours, theirs)
    expected, expected_gradients = differentiate(core, tensors, None, state_seqs=state_seqs)
    actual, gradients = differentiate(core, tensors, target, state_seqs=state_seqs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert 0 < float(expected[0].detach().mean()) < 1
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_exchanged", [False, True])
@pytest.mark.parametrize("interpolation", ["linear", "gaussian"])
@pytest.mark.long(all_but=["linear-True"])
def test_layers_with_delays_run_in_one_launch(
    interpolation: str,
    is_exchanged: bool,
    set_exchange: SetExchange,  # noqa: F811
    launches: list[str],  # noqa: F811
) -> None:
    set_exchange(is_exchanged)
    torch.manual_seed(0)
    delay = Delay(torch.rand(20) * 5, max_delay=5, learn=True, interpolation=interpolation)
    layer = Recurrent(LIF(), 20, delay=delay).to(DEVICE)
    x = (3 * torch.rand(9, 17, 20)).to(DEVICE)
    results = []
    for backend in ("torch", "triton"):
        layer.backend = backend
        layer.reset()
        output = layer(x)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    # Kernels add the terms of products in another order, so a few spikes differ.
    assert (results[0][0] != results[1][0]).float().mean() < 0.01
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert launches == ["one launch"] * 2


@pytest.mark.parametrize(("needs_initial_gradients", "count"), [(False, 6), (True, 7), (True, 18)])
@pytest.mark.parametrize("interpolation", ["linear", "triangle"])
@pytest.mark.long(all_but=["triangle-True-7"])
def test_gradients_of_delayed_outputs_are_not_carried(
    interpolation: str,
    needs_initial_gradients: bool,
    count: int,
    launches: list[str],  # noqa: F811
) -> None:
    """Checks that sums over products of later steps replace the carried gradients of delayed outputs. Only the
    gradients of initial outputs need carried gradients.
    """
    torch.manual_seed(0)
    width = {} if interpolation == "linear" else {"width": 2.5}
    delay = Delay(5 * torch.rand(20), max_delay=count, learn=True, interpolation=interpolation, **width)  # type: ignore[arg-type]
    layer = Recurrent(LIF(), 20, delay=delay).to(DEVICE)
    x = (3 * torch.rand(13, 17, 20)).to(DEVICE)
    initial = [torch.rand(17, 20).to(DEVICE).requires_grad_(needs_initial_gradients) for _ in range(count + 2)]
    results = []
    for backend in ("torch", "triton"):
        layer.backend = backend
        layer.states = list(initial)
        output = layer(x)
        leaves = [*layer.parameters(), *(initial if needs_initial_gradients else ())]
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    assert (results[0][0] != results[1][0]).float().mean() < 0.01
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert launches == ["one launch"] * 2
    (step,) = layer._get_program().specializations
    assert isinstance(step, RecurrentSpecialization)
    for plan in step.backward_plans.values():
        vjp = plan.segments[0].staged
        carried = [port for port in vjp.arguments if port.role is Role.GRAD_STATE]
        assert len(carried) == (count + 2 if needs_initial_gradients else 2)
        assert len(vjp.later) == (0 if needs_initial_gradients else count)


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", ["linear", "triangle"])
@pytest.mark.parametrize("shape", [(40, 33, 200), (12, 300, 256)])
def test_delays_run_in_clusters(shape: tuple[int, int, int], interpolation: str) -> None:
    """Checks that spikes equal the loop, because all sums of spikes are exact, and that gradients equal the loop within
    the rounding of float32.
    """
    width = {} if interpolation == "linear" else {"width": 4.0}
    torch.manual_seed(0)
    delays = torch.randint(1, 8 * 9, shape[-1:]) / 8
    delay = Delay(delays, max_delay=9, learn=True, interpolation=interpolation, **width)  # type: ignore[arg-type]
    layer = Recurrent(LIF(), shape[-1], delay=delay).to("cuda")
    with torch.no_grad():
        layer.V.copy_((torch.randn(layer.V.shape) * 8).round() / 64)
    x = ((torch.randn(shape) + 0.5) * 8).round().div(8).to("cuda")
    weights = torch.randn(shape, device="cuda")
    results = []
    for backend in ("torch", "triton"):
        layer.backend = backend
        layer.reset()
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        results.append([output.detach(), *torch.autograd.grad(output, [leaf, *layer.parameters()], weights)])
    assert layer.explain().count("of 4 blocks") + layer.explain().count("of 8 blocks") == 2, layer.explain()
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        assert (a - b).abs().max() < 1e-4 * a.abs().max()


@pytest.mark.parametrize("max_delay", [9, 18])
@pytest.mark.parametrize("interpolation", ["linear", "triangle"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.long(all_but=[f"{TARGETS[-1]}-linear-9"])
def test_loop_of_the_backward_reads_few_delayed_states(
    target: TargetName,
    interpolation: str,
    max_delay: int,
    launches: list[str],  # noqa: F811
) -> None:
    """Checks that sums over time that need many delayed states run after the loop of the backward. The loop reads few
    states, because it would otherwise need more registers than a kernel has.
    """
    torch.manual_seed(0)
    width = {} if interpolation == "linear" else {"width": 4.0}
    delay = Delay(
        0.3 + (max_delay - 1) * torch.rand(5),
        max_delay=max_delay,
        learn=True,
        interpolation=interpolation,
        **width,  # type: ignore[arg-type]
    )
    layer = Recurrent(LIF(), 5, delay=delay).to(DEVICE, torch.float64)
    x = (3 * torch.rand(25, 3, 5)).to(DEVICE, torch.float64)
    results = []
    for backend in ("torch", target):
        layer.backend = backend
        layer.reset()
        output = layer(x)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    (step,) = layer._get_program().specializations
    assert isinstance(step, RecurrentSpecialization)
    for vjp in step._vjps.values():
        in_loop = [part for part in vjp.parts if part.phase is Phase.LOOP]
        read = {view.source for part in in_loop for view in part.reads if view.source.role is Role.STATE}
        assert len(read) < 8
        assert any(part.phase is Phase.AFTER for part in vjp.parts)
    assert "values go from step to step" not in "".join(launches)
