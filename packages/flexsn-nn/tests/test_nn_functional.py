"""Functions for whole networks: state, step mode and backend."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from flexsn_nn import IF, LIF, FlexSN, StepModeError, UnknownNameError, functional


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    first = LIF(tau=2.0, backend="torch")
    second = FlexSN(lambda x, v: (x + 0.5 * v, x + 0.5 * v), 1, 1, 1, backend="torch")
    return nn.Sequential(nn.Linear(3, 4), first, nn.Sequential(nn.Linear(4, 2), second))


X = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(1)) * 3


def test_neurons_are_found_by_name() -> None:
    net = make_net()
    assert [name for name, _ in functional.neurons(net)] == ["1", "2.1"]
    neuron = IF()
    assert list(functional.neurons(neuron)) == [("IF", neuron)]


def test_reset_net_restores_the_initial_state() -> None:
    net = make_net()
    first = net(X)
    assert not torch.equal(net(X), first)
    functional.reset_net(net)
    assert torch.equal(net(X), first)


def test_detach_net_cuts_gradients_between_chunks() -> None:
    """Checks that `detach_net` keeps the values of states and cuts the gradients between chunks."""
    net = make_net()
    expected = net(X)
    functional.reset_net(net)
    parts, gradients = [], []
    for chunk in torch.split(X, 3):
        leaf = chunk.clone().requires_grad_()
        output = net(leaf)
        parts.append(output.detach())
        gradients.append(torch.autograd.grad(output.sum(), leaf)[0])
        functional.detach_net(net)
        states = [state for states_of_neuron in functional.get_states(net).values() for state in states_of_neuron]
        assert [state.requires_grad for state in states] == [False, False]
    assert torch.equal(torch.cat(parts), expected)
    leaf = X.clone().requires_grad_()
    functional.reset_net(net)
    (full,) = torch.autograd.grad(net(leaf).sum(), leaf)
    assert torch.equal(gradients[1], full[3:]), "no chunk follows the last chunk"
    assert not torch.equal(gradients[0], full[:3]), "the gradient of the first chunk excludes its effect on the second"


def test_step_mode_and_backend_are_set_for_all_neurons() -> None:
    net = make_net()
    expected = net(X)
    functional.reset_net(net)
    functional.set_step_mode(net, "s")
    assert torch.allclose(torch.stack([net(x) for x in X]), expected, rtol=1e-5, atol=1e-6)
    functional.set_step_mode(net, "m")
    functional.set_backend(net, "hop")
    functional.reset_net(net)
    assert torch.equal(net(X), expected)
    assert all(neuron.explain().startswith("hop") for _, neuron in functional.neurons(net))


def test_a_refused_change_changes_nothing() -> None:
    net = make_net()
    first, second = (neuron for _, neuron in functional.neurons(net))
    second.step_mode = "s"
    with pytest.raises(StepModeError, match="needs step_mode='m'"):
        functional.set_backend(net, "triton")
    assert first.backend == "torch"
    second.step_mode = "m"
    second.backend = "triton"
    with pytest.raises(StepModeError, match="needs step_mode='m'"):
        functional.set_step_mode(net, "s")
    assert first.step_mode == "m"
    with pytest.raises(UnknownNameError, match="'M'"):
        functional.set_step_mode(net, "M")
    with pytest.raises(UnknownNameError, match="Did you mean 'triton'"):
        functional.set_backend(net, "triton2")


def test_states_are_read_and_restored() -> None:
    net = make_net()
    assert functional.get_states(net) == {"1": [], "2.1": []}
    net(X[:3])
    states = functional.get_states(net)
    expected = net(X[3:])
    net(X)
    functional.set_states(net, states)
    assert torch.equal(net(X[3:]), expected)
    with pytest.raises(UnknownNameError, match=r"neuron '2\.2'.*Did you mean '2\.1'"):
        functional.set_states(net, {"2.2": []})


def test_reset_net_reaches_shared_nested_and_replaced_modules() -> None:
    shared = IF()
    net = nn.Sequential(nn.Sequential(shared, nn.ModuleDict({"a": shared})), IF())
    x = torch.ones(2, 3)
    for has_replacements in (False, True):
        if has_replacements:
            net[1] = IF()
            net.register_module("nothing", None)
            net.append(nn.Sequential(IF()))
        members = [neuron for _, neuron in functional.neurons(net)]
        assert len(members) == 2 + has_replacements
        for neuron in members:
            neuron(x)
            assert neuron.states
        functional.reset_net(net)
        assert not any(neuron.states for neuron in members)


def test_reset_net_calls_python_once_per_module_with_a_state() -> None:
    """Counts calls instead of time. Modules without a state cause no calls."""

    def count_calls(blocks: int) -> int:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), IF()) for _ in range(blocks)))
        functional.reset_net(net)
        count = 0

        def count_call(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        profiler = sys.getprofile()
        sys.setprofile(count_call)
        try:
            functional.reset_net(net)
        finally:
            sys.setprofile(profiler)
        return count

    num_few, num_many = count_calls(10), count_calls(110)
    assert num_many - num_few <= 100  # The larger network has 100 more modules with a state.
