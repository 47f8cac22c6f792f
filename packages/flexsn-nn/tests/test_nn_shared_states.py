"""One instance at two places of a network shares its state, which causes one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import LIF, RLIF, OverTime, SharedStateWarning
from flexsn_nn.functional import detach_net, reset_net, set_step_mode
from flexsn_nn.layer import Delay

X = torch.rand(4, 2, 5, generator=torch.Generator().manual_seed(0))


class Called(nn.Module):
    """A network whose `forward` is a function of its layers."""

    def __init__(self, forward: Callable[..., Tensor], neuron: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.neuron = nn.Linear(5, 5), nn.Linear(5, 5), neuron
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def call_twice(net: Called, x: Tensor) -> Tensor:
    out: Tensor = net.neuron(net.second(net.neuron(net.first(x))))
    return out


def call_in_chunks(net: Called, x: Tensor) -> Tensor:
    return torch.cat([net.neuron(part) for part in net.first(x).split(2)])


def call_once(net: Called, x: Tensor) -> Tensor:
    out: Tensor = net.neuron(net.second(net.first(x)))
    return out


def feed_back(net: Called, x: Tensor) -> Tensor:
    """Runs single steps, with a recurrent connection from the output to the input."""
    out = torch.zeros_like(x[0])
    for step in x:
        out = net.neuron(net.first(step) + net.second(out))
    return out


@pytest.mark.parametrize("make", [LIF, lambda: LIF(backend="torch"), lambda: RLIF(5)], ids=["LIF", "loop", "RLIF"])
def test_an_input_that_depends_on_the_earlier_output_causes_a_warning(make: Callable[[], nn.Module]) -> None:
    net = Called(call_twice, make())
    with pytest.warns(SharedStateWarning, match="is in two places of a network.*its own instance"):
        net(X)
    reset_net(net)
    net(X)  # This call causes no second warning.


@pytest.mark.parametrize("forward", [call_in_chunks, call_once, feed_back])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_usual_networks_cause_no_warning(forward: Callable[..., Tensor], backend: str) -> None:
    net = Called(forward, LIF(backend=backend))
    if forward is feed_back:
        set_step_mode(net, "s")
    for end_sequence in (reset_net, detach_net):
        for _ in range(2):
            net(X).sum().backward()
            end_sequence(net)


def test_a_reset_detects_one_instance_at_two_places() -> None:
    for make in (lambda: LIF(step_mode="s"), lambda: Delay(1)):
        shared = make()
        with pytest.warns(SharedStateWarning):
            reset_net(nn.Sequential(nn.Linear(5, 5), shared, nn.Linear(5, 5), shared))
        block = nn.Sequential(nn.Linear(5, 5), make())
        net = nn.ModuleList([nn.Sequential(block, nn.Sequential(block))])
        with pytest.warns(SharedStateWarning):
            reset_net(net)
        reset_net(net)


def test_two_names_of_one_layer_cause_no_warning() -> None:
    net = Called(call_once, LIF())
    net.alias, net.blocks = net.neuron, nn.ModuleList([net.neuron])
    linear = nn.Linear(5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reset_net(net)
        reset_net(nn.Sequential(linear, LIF(), linear, OverTime(linear), LIF()))
        net(X)
