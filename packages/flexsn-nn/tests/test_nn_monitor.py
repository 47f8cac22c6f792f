"""Monitors record the activity of neurons without changing the neurons."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexsn_nn import ALIF, IF, LIF, FlexSN, ParameterError, UnknownNameError, functional, monitor

# Kernels run on CPU tensors in this file.
pytestmark = pytest.mark.usefixtures("interpreted")

X = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(1)) * 3


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    second = ALIF(v_threshold=0.1, backend="torch")
    return nn.Sequential(nn.Linear(3, 4), IF(backend="torch"), nn.Linear(4, 2), second)


def test_rates_are_means_over_calls() -> None:
    net = make_net()
    outputs: list[torch.Tensor] = []
    with monitor.RateMonitor(net) as rates:
        assert rates.rates() == {}
        outputs += [net(X[:4]), net(X[4:])]
    net(X)  # This call is not recorded.
    mean = torch.cat(outputs).mean().item()
    assert 0.05 < mean < 0.95
    assert rates.rates()["3"] == pytest.approx(mean)
    assert set(rates.rates()) == {"1", "3"}
    rates.clear()
    assert rates.rates() == {}


def test_spikes_of_sequences_and_of_single_steps_are_recorded() -> None:
    net = make_net()
    with monitor.SpikeMonitor(net, layers=["3"]) as spikes:
        output = net(X)
        assert torch.equal(spikes.sequence("3"), output)
        assert not spikes.sequence("3").requires_grad
        spikes.clear()
        functional.reset_net(net)
        functional.set_step_mode(net, "s")
        for x in X:
            net(x)
        assert torch.equal(spikes.sequence("3"), output)


def test_states_of_sequences_and_of_single_steps_are_recorded() -> None:
    net = make_net()
    adaptive = net[3]
    assert isinstance(adaptive, ALIF)
    adaptive.store_state_seqs = True
    net(X)
    expected = dict(zip(("v", "a"), adaptive.state_seqs, strict=True))
    adaptive.store_state_seqs = False
    functional.reset_net(net)
    with monitor.StateMonitor(net) as v, monitor.StateMonitor(net, "a", layers=["3"]) as a:
        net(X[:2])
        net(X[2:])
        assert torch.equal(v.sequence("3"), expected["v"])
        assert torch.equal(a.sequence("3"), expected["a"])
        assert v.sequence("1").shape == (6, 5, 4)
        functional.reset_net(net)
        functional.set_step_mode(net, "s")
        a.clear()
        for x in X:
            net(x)
        assert torch.equal(a.sequence("3"), expected["a"])
    assert not any(neuron.store_state_seqs for _, neuron in functional.neurons(net))


def test_states_of_a_core_without_names_are_recorded_by_index() -> None:
    neuron = FlexSN(lambda x, v: (x + v, 2 * v + x), 1, 1, 1, backend="torch")
    with monitor.StateMonitor(neuron, 0) as states:
        neuron(torch.ones(3, 1))
    assert states.sequence("FlexSN").flatten().tolist() == [1, 3, 7]
    with pytest.raises(ParameterError, match="have no names: give the index of a state"):
        monitor.StateMonitor(neuron, "v")
    with pytest.raises(UnknownNameError, match="unknown state '1'; known: '0'"):
        monitor.StateMonitor(neuron, 1)
    assert not neuron._forward_hooks
    assert not neuron.store_state_seqs


def test_monitors_record_calls_in_kernels() -> None:
    neuron = LIF(backend="triton")
    with monitor.StateMonitor(neuron) as v, monitor.SpikeMonitor(neuron) as spikes:
        output = neuron(X)
    neuron.reset()
    neuron.backend = "torch"
    with monitor.StateMonitor(neuron) as expected:
        assert torch.equal(neuron(X), output)
    assert torch.equal(spikes.sequence("LIF"), output)
    assert torch.equal(v.sequence("LIF"), expected.sequence("LIF"))


def test_wrong_arguments_are_refused() -> None:
    net = make_net()
    with pytest.raises(UnknownNameError, match=r"unknown layer '0'; known: '1', '3'"):
        monitor.SpikeMonitor(net, layers=["0"])
    with pytest.raises(UnknownNameError, match="unknown state 'a'; known: 'v'"):
        monitor.StateMonitor(net, "a")
    with pytest.raises(ParameterError, match="Linear has no FlexSN neuron"):
        monitor.RateMonitor(net[0])
    with pytest.raises(ParameterError, match="no call of '1' was recorded yet"):
        monitor.SpikeMonitor(net).sequence("1")
