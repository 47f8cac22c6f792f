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


def counting(neuron: FlexSN) -> FlexSN:
    neuron.count_spikes = True
    return neuron


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def counts(neuron: FlexSN) -> Tensor:
    assert neuron.spike_counts is not None
    return neuron.spike_counts


def in_kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replaces `per_channel` and returns a list, to which each count appends True if it is summed from `[*step]`."""
    seen = []

    def noting(values: Tensor, *, lead: int) -> Tensor:
        seen.append(lead == 0)
        return per_channel(values, lead=lead)

    monkeypatch.setattr("flexsn_nn._flexsn.per_channel", noting)
    return seen


@pytest.mark.long(all_but=["triton-shape0", "triton-shape1", "triton-shape4"])
@pytest.mark.parametrize("shape", [(5, 2, 3, 4, 7), (37, 2, 5), (4, 6), (1, 2, 3), (3,)])
def test_counts_are_sums(backend: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = in_kernel(monkeypatch)
    neuron, x = counting(LIF(backend=backend)), data(*shape)
    # The first call starts from the initial state, and the second one from the state of the first.
    for _ in range(2):
        output = neuron(x)
        step = output.sum(0)
        channel = min(1, step.dim() - 1)
        expected = step.movedim(channel, 0).flatten(1).sum(1) if step.dim() > 1 else step
        assert torch.equal(counts(neuron), expected)
        assert len(neuron.states) == 1
    assert seen == [True, True]
    neuron.reset()
    assert neuron.spike_counts is None


@pytest.mark.long(all_but=["triton-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_counts_of_other_dtypes(backend: str, dtype: torch.dtype) -> None:
    """Checks counts beyond 256, which bfloat16 cannot represent exactly."""
    neuron = counting(LIF(v_threshold=0.1, backend=backend))
    output = neuron(data(300, 2, 3, dtype=dtype).add(1))
    assert counts(neuron).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(counts(neuron), output.double().sum((0, 1)).to(counts(neuron).dtype))
    assert counts(neuron).max() > 500
    assert neuron.states[0].dtype == dtype


@pytest.mark.long(all_but=["triton-False"])
@pytest.mark.parametrize("regulariser_alone", [False, True])
def test_gradients_of_a_rate_regulariser(backend: str, regulariser_alone: bool) -> None:
    found = []
    weight = torch.linspace(-1, 1, 3, dtype=torch.float64)
    for name in (backend, "torch"):
        neuron = ParametricLIF(backend=name, surrogate_function=Sigmoid())
        counting(neuron).double()
        x = data(11, 2, 3, 4, dtype=torch.float64).requires_grad_()
        loss = x.new_zeros(())
        for _ in range(2):
            output = neuron(x)
            loss = loss + ((counts(neuron) / output[:, :, 0].numel() - 0.1).square() * weight).sum()
            if not regulariser_alone:
                loss = loss + (output * torch.linspace(-1, 1, output.numel()).view_as(output)).mean()
        found.append(torch.autograd.grad(loss, [x, *neuron.parameters()]))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0].abs().max() > 0


def test_memory_formats_of_outputs_and_states(backend: str) -> None:
    x = data(3, 2, 4, 3, 3).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    plain, neuron = LIF(backend=backend), counting(LIF(backend=backend))
    plain.store_state_seqs = neuron.store_state_seqs = True
    for _ in range(2):
        expected, found = plain(x), neuron(x)
        for a, b in zip(
            (expected, *plain.states, *plain.state_seqs), (found, *neuron.states, *neuron.state_seqs), strict=True
        ):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert torch.equal(counts(neuron), expected.sum((0, 1, 3, 4)))


def test_inputs_without_a_gradient_and_norms(backend: str) -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x + v, 0.5 * v

    neuron = counting(FlexSN(core, 1, 1, 1, requires_grad=[False, True], backend=backend))
    x = data(3, 2, 4).requires_grad_()
    for _ in range(2):
        assert not neuron(x).requires_grad
    torch.testing.assert_close(counts(neuron), x.detach().sum((0, 1)))

    fused = NormNeuron(nn.BatchNorm2d(4), counting(LIF(backend=backend)))
    loop = deepcopy(fused)
    loop.neuron.backend = "torch"
    x = data(3, 2, 4, 3, 3).requires_grad_()
    grads = []
    for net in (fused, loop):
        output = net(x)
        assert torch.equal(counts(net.neuron).detach(), output.detach().sum((0, 1, 3, 4)))
        weight = torch.linspace(0, 1, 4)
        grads.append(torch.autograd.grad((counts(net.neuron) * weight).sum(), [x, *net.norm.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


def test_steps_loops_and_switching(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = in_kernel(monkeypatch)
    neuron, x = LIF(backend="torch"), data(4, 2, 3)
    neuron(x)
    assert neuron.spike_counts is None
    counting(neuron)
    neuron.reset()
    expected = neuron(x).sum((0, 1))
    assert torch.equal(counts(neuron), expected)
    neuron.reset()
    neuron.backend, neuron.step_mode = "auto", "s"
    total = torch.zeros(3)
    for step in x:
        neuron(step)
        total += counts(neuron)
    assert torch.equal(total, expected)
    assert not any(seen[:1])
    copy = deepcopy(neuron)
    assert torch.equal(counts(copy), counts(neuron))
    neuron.step_mode, neuron.backend, neuron.count_spikes = "m", backend, False
    for _ in range(3):
        neuron.reset()
        neuron(x)
    assert neuron.spike_counts is None
    counting(neuron).step(x)
    assert neuron.spike_counts is None, "the module stores no result of a step"
    with RateMonitor(counting(neuron)) as monitor:
        neuron.reset()
        neuron(x)
    assert monitor.rates()["LIF"] == pytest.approx(float(expected.sum()) / x.numel())
    assert seen[-1]
    assert len(neuron(x[:0])) == 0
    assert counts(neuron).tolist() == [0, 0, 0]


def test_in_a_compiled_graph() -> None:
    neuron, x = counting(LIF()), data(4, 2, 3)
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    assert torch.equal(counts(neuron), output.sum((0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_on_a_gpu(dtype: torch.dtype) -> None:
    x = data(16, 32, 48, 9, 7, dtype=dtype).cuda()
    for frames in (x, x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (16, 32))):
        neuron, grads = counting(LIF(backend="triton")), []
        for _ in range(3):
            neuron.reset()
            leaf = frames.clone().requires_grad_()
            output = neuron(leaf)
            assert torch.equal(counts(neuron).detach(), output.detach().float().sum((0, 1, 3, 4)))
            grads.append(torch.autograd.grad((counts(neuron) * torch.linspace(0, 1, 48, device="cuda")).sum(), leaf)[0])
        assert torch.equal(grads[0], grads[1])
        leaf = frames.clone().requires_grad_()
        plain = LIF(backend="triton")(leaf).sum((0, 1, 3, 4), dtype=torch.float32)
        (expected,) = torch.autograd.grad((plain * torch.linspace(0, 1, 48, device="cuda")).sum(), leaf)
        torch.testing.assert_close(grads[2], expected)
