"""Spike counts from kernels: they equal the sums of the spikes, and their gradients equal those of the sums."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, FlexSN
from flexsn_nn.layer import NormNeuron
from flexsn_nn.monitor import RateMonitor
from flexsn_nn.neuron import ParametricLIF
from flexsn_nn.surrogate import Sigmoid
from flexsn_nn.transforms._counts import per_channel


@pytest.fixture(params=["triton", pytest.param("cpp", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param


def enable_counts(neuron: FlexSN) -> FlexSN:
    neuron.count_spikes = True
    return neuron


def draw_input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def read_counts(neuron: FlexSN) -> Tensor:
    assert neuron.spike_counts is not None
    return neuron.spike_counts


def watch_counts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replaces `per_channel`, and returns a list. Each count appends True if it sums `[*step]`, not `[T, *step]`."""
    from_step = []

    def watch(values: Tensor, *, lead: int) -> Tensor:
        from_step.append(lead == 0)
        return per_channel(values, lead=lead)

    monkeypatch.setattr("flexsn_nn._flexsn.per_channel", watch)
    return from_step


@pytest.mark.long(all_but=["triton-shape0", "triton-shape1", "triton-shape4"])
@pytest.mark.parametrize("shape", [(5, 2, 3, 4, 7), (37, 2, 5), (4, 6), (1, 2, 3), (3,)])
def test_counts_are_sums_of_spikes(backend: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from_step = watch_counts(monkeypatch)
    neuron, x = enable_counts(LIF(backend=backend)), draw_input(*shape)
    # The first call starts from the initial state, and the second one from the state of the first.
    for _ in range(2):
        output = neuron(x)
        step = output.sum(0)
        channel = min(1, step.dim() - 1)
        expected = step.movedim(channel, 0).flatten(1).sum(1) if step.dim() > 1 else step
        assert torch.equal(read_counts(neuron), expected)
        assert len(neuron.states) == 1
    assert from_step == [True, True]
    neuron.reset()
    assert neuron.spike_counts is None


@pytest.mark.long(all_but=["triton-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_counts_have_at_least_float32(backend: str, dtype: torch.dtype) -> None:
    """Checks counts beyond 256, which bfloat16 cannot represent exactly."""
    neuron = enable_counts(LIF(v_threshold=0.1, backend=backend))
    output = neuron(draw_input(300, 2, 3, dtype=dtype).add(1))
    assert read_counts(neuron).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(read_counts(neuron), output.double().sum((0, 1)).to(read_counts(neuron).dtype))
    assert read_counts(neuron).max() > 500
    assert neuron.states[0].dtype == dtype


@pytest.mark.long(all_but=["triton-False"])
@pytest.mark.parametrize("regulariser_alone", [False, True])
def test_a_rate_regulariser_has_the_gradients_of_the_loop(backend: str, regulariser_alone: bool) -> None:
    gradients = []
    weight = torch.linspace(-1, 1, 3, dtype=torch.float64)
    for name in (backend, "torch"):
        neuron = ParametricLIF(backend=name, surrogate_function=Sigmoid())
        enable_counts(neuron).double()
        x = draw_input(11, 2, 3, 4, dtype=torch.float64).requires_grad_()
        loss = x.new_zeros(())
        for _ in range(2):
            output = neuron(x)
            loss = loss + ((read_counts(neuron) / output[:, :, 0].numel() - 0.1).square() * weight).sum()
            if not regulariser_alone:
                loss = loss + (output * torch.linspace(-1, 1, output.numel()).view_as(output)).mean()
        gradients.append(torch.autograd.grad(loss, [x, *neuron.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0][0].abs().max() > 0


def test_counting_keeps_the_memory_formats_of_outputs_and_states(backend: str) -> None:
    x = draw_input(3, 2, 4, 3, 3).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    plain, neuron = LIF(backend=backend), enable_counts(LIF(backend=backend))
    plain.store_state_seqs = neuron.store_state_seqs = True
    for _ in range(2):
        expected, output = plain(x), neuron(x)
        for a, b in zip(
            (expected, *plain.states, *plain.state_seqs), (output, *neuron.states, *neuron.state_seqs), strict=True
        ):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert torch.equal(read_counts(neuron), expected.sum((0, 1, 3, 4)))


def test_counts_have_the_gradients_of_inputs_and_norms(backend: str) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x + v, 0.5 * v

    neuron = enable_counts(FlexSN(core, 1, 1, 1, requires_grad=[False, True], backend=backend))
    x = draw_input(3, 2, 4).requires_grad_()
    for _ in range(2):
        assert not neuron(x).requires_grad
    torch.testing.assert_close(read_counts(neuron), x.detach().sum((0, 1)))

    fused = NormNeuron(nn.BatchNorm2d(4), enable_counts(LIF(backend=backend)))
    loop = deepcopy(fused)
    loop.neuron.backend = "torch"
    x = draw_input(3, 2, 4, 3, 3).requires_grad_()
    grads = []
    for net in (fused, loop):
        output = net(x)
        assert torch.equal(read_counts(net.neuron).detach(), output.detach().sum((0, 1, 3, 4)))
        weight = torch.linspace(0, 1, 4)
        grads.append(torch.autograd.grad((read_counts(net.neuron) * weight).sum(), [x, *net.norm.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


def test_counts_are_equal_for_steps_and_loops_and_after_switches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from_step = watch_counts(monkeypatch)
    neuron, x = LIF(backend="torch"), draw_input(4, 2, 3)
    neuron(x)
    assert neuron.spike_counts is None
    enable_counts(neuron)
    neuron.reset()
    expected = neuron(x).sum((0, 1))
    assert torch.equal(read_counts(neuron), expected)
    neuron.reset()
    neuron.backend, neuron.step_mode = "auto", "s"
    total = torch.zeros(3)
    for step in x:
        neuron(step)
        total += read_counts(neuron)
    assert torch.equal(total, expected)
    assert not any(from_step[:1])
    copy = deepcopy(neuron)
    assert torch.equal(read_counts(copy), read_counts(neuron))
    neuron.step_mode, neuron.backend, neuron.count_spikes = "m", backend, False
    for _ in range(3):
        neuron.reset()
        neuron(x)
    assert neuron.spike_counts is None
    enable_counts(neuron).step(x)
    assert neuron.spike_counts is None, "the module stores no result of `step`"
    with RateMonitor(enable_counts(neuron)) as monitor:
        neuron.reset()
        neuron(x)
    assert monitor.rates()["LIF"] == pytest.approx(float(expected.sum()) / x.numel())
    assert from_step[-1]
    assert len(neuron(x[:0])) == 0
    assert read_counts(neuron).tolist() == [0, 0, 0]


def test_counts_in_a_compiled_graph_equal_sums() -> None:
    neuron, x = enable_counts(LIF()), draw_input(4, 2, 3)
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    assert torch.equal(read_counts(neuron), output.sum((0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_on_a_gpu(dtype: torch.dtype) -> None:
    x = draw_input(16, 32, 48, 9, 7, dtype=dtype).cuda()
    for frames in (x, x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (16, 32))):
        neuron, grads = enable_counts(LIF(backend="triton")), []
        for _ in range(3):
            neuron.reset()
            leaf = frames.clone().requires_grad_()
            output = neuron(leaf)
            assert torch.equal(read_counts(neuron).detach(), output.detach().float().sum((0, 1, 3, 4)))
            grads.append(
                torch.autograd.grad((read_counts(neuron) * torch.linspace(0, 1, 48, device="cuda")).sum(), leaf)[0]
            )
        assert torch.equal(grads[0], grads[1])
        leaf = frames.clone().requires_grad_()
        plain = LIF(backend="triton")(leaf).sum((0, 1, 3, 4), dtype=torch.float32)
        (expected,) = torch.autograd.grad((plain * torch.linspace(0, 1, 48, device="cuda")).sum(), leaf)
        torch.testing.assert_close(grads[2], expected)
