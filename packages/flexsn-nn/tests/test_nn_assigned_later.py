"""Attributes that are set, called or removed after construction: checks use the current values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import IF, LIF, PSN, Leaky, ParameterError, StateError, StepModeError, UnknownNameError, functional
from flexsn_nn.layer import Delay, SharedDropout, ThresholdDependentBatchNorm2d
from flexsn_nn.memory import PackedSpikes
from flexsn_nn.monitor import StateMonitor
from flexsn_nn.neuron import GatedLIF


class Scaled(LIF):
    """A neuron whose output no longer consists of spikes."""

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        return super().forward(*inputs, **options) * 0.3


class ScaledPSN(PSN):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.3


def make_hooked() -> nn.Module:
    neuron = LIF()
    neuron.register_forward_hook(lambda module, inputs, output: output * 0.3)
    return neuron


@pytest.mark.parametrize("make", [Scaled, lambda: ScaledPSN(4), make_hooked], ids=["forward", "psn", "hook"])
def test_outputs_that_are_not_spikes_are_not_stored_as_bits(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), make(), nn.Linear(32, 5), LIF())
    x = 2 * torch.randn(4, 8, 16)
    functional.reset_net(net)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    functional.reset_net(net)
    with PackedSpikes(net):
        loss = net(x).sum()
    for a, b in zip(torch.autograd.grad(loss, list(net.parameters())), expected, strict=True):
        assert torch.equal(a, b)


def test_conduct_of_each_step_needs_sequences() -> None:
    neuron = GatedLIF(T=4)
    functional.set_step_mode(neuron, "s")
    with pytest.raises(StepModeError, match="T gives each step its own conduct"):
        neuron(torch.rand(6))


def test_assigned_names_and_delays_are_checked() -> None:
    neuron, delay = Leaky(0.7), Delay(1, max_delay=2)
    neuron.reset_mechanism = "zero"
    with pytest.raises(UnknownNameError, match="sbutract"):
        neuron.reset_mechanism = "sbutract"
    for wrong in (-1, 5):
        with pytest.raises(ParameterError):
            delay.delay = wrong
    delay.delay = 1.5
    assert delay(torch.tensor([[2.0], [4.0], [6.0]])).flatten().tolist() == [0.0, 1.0, 3.0]


def test_delays_between_two_steps_interpolate_integers() -> None:
    x = torch.arange(4).view(4, 1) * 10
    for delay in (0.5, torch.tensor([0.5])):
        assert Delay(delay)(x).flatten().tolist() == [0.0, 5.0, 15.0, 25.0]
        assert Delay(delay)(x > 0).flatten().tolist() == [0.0, 0.5, 1.0, 1.0]


def test_results_have_the_dtype_of_the_input() -> None:
    dropout, delay = SharedDropout(0.5), Delay(1.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert dropout(torch.rand(3, 40, dtype=dtype)).dtype == dtype
    assert SharedDropout(0.5)(torch.rand(0, 4)).shape == (0, 4)
    delay(torch.rand(3, 2))
    with pytest.raises(StateError, match=r"inputs is .* torch\.float32 .*; for this input it is .* torch\.float64"):
        delay(torch.rand(3, 2).double())


def test_a_norm_without_a_weight_is_refused() -> None:
    with pytest.raises(ParameterError, match="affine=False"):
        ThresholdDependentBatchNorm2d(3, affine=False)


def test_monitors_of_one_neuron_are_removed_in_any_order() -> None:
    neuron, x = IF(), torch.rand(3, 2)
    first, second = StateMonitor(neuron), StateMonitor(neuron)
    neuron(x)
    first.remove()
    neuron(x)
    second.remove()
    second.remove()
    neuron(x)
    assert (len(first.sequence("IF")), len(second.sequence("IF"))) == (3, 6)
    assert not neuron.store_state_seqs
