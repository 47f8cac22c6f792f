"""Plausible wrong arguments of public constructors and functions: each error names a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import OverTime, SharedStateWarning, loss, metrics
from flexsn_nn import functional as F
from flexsn_nn.data import length_mask, mask_padding, readout
from flexsn_nn.distributed import FromReset, TimeShards
from flexsn_nn.encoding import direct, latency, rate
from flexsn_nn.fusion import fuse_norms, unfuse_norms
from flexsn_nn.init import spectral_radius
from flexsn_nn.layer import Delay, MSBlock, SEWBlock, SharedDropout
from flexsn_nn.memory import PackedSpikes
from flexsn_nn.monitor import RateMonitor, SpikeMonitor, StateMonitor, SynapseMonitor
from flexsn_nn.neuron import LIF, PSN, RLIF, ParametricLIF, SlidingPSN, StochasticLIF
from flexsn_runtime import DeviceError

X = torch.rand(4, 2, 5)
shared = LIF()


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def wrong(value: object) -> Any:
    """Returns a value of a type that the function does not accept."""
    return value


def list_wrong_nets(function: Callable[..., Any]) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Returns calls of a function of networks with other objects."""
    return [
        (lambda: function([LIF()]), TypeError, r"net is a list; give an nn\.Module: nn\.ModuleList"),
        (lambda: function(LIF), TypeError, r"net is the class LIF; give an instance: LIF\(\.\.\.\)"),
        (lambda: function(None), TypeError, r"net is a NoneType; give an nn\.Module"),
    ]


def list_wrong_tensors(function: Callable[[Any], Any]) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Returns calls of a function of tensors with other objects."""
    return [
        (lambda: function([X]), TypeError, r"is a list; give a tensor: torch\.stack"),
        (lambda: function(None), TypeError, r"is a NoneType; give a tensor"),
    ]


B = torch.tensor([1, 2])
NETS: dict[str, Callable[..., Any]] = {
    "reset_net": F.reset_net,
    "detach_net": F.detach_net,
    "get_states": F.get_states,
    "neurons": lambda net: list(F.neurons(net)),
    "set_states": lambda net: F.set_states(net, {}),
    "set_backend": lambda net: F.set_backend(net, "torch"),
    "set_step_mode": lambda net: F.set_step_mode(net, "s"),
    "SpikeMonitor": SpikeMonitor,
    "RateMonitor": RateMonitor,
    "StateMonitor": StateMonitor,
    "SynapseMonitor": SynapseMonitor,
    "PackedSpikes": PackedSpikes,
    "fuse_norms": fuse_norms,
    "TimeShards": TimeShards,
    "unfuse_norms": unfuse_norms,
    "FromReset": FromReset,
}
TENSORS: dict[str, Callable[[Any], Any]] = {
    "readout": lambda x: readout(x, B),
    "readout's lengths": lambda x: readout(X, x),
    "mask_padding": lambda x: mask_padding(x, B),
    "length_mask": lambda x: length_mask(x, 4),
    "rate": lambda x: rate(x, 3),
    "latency": lambda x: latency(x, 3),
    "direct": lambda x: direct(x, 3),
    "accuracy": lambda x: metrics.accuracy(x, B),
    "first_spike_accuracy": lambda x: metrics.first_spike_accuracy(x, B),
    "time_to_first_spike": metrics.time_to_first_spike,
    "ce_rate_loss": lambda x: loss.ce_rate_loss(x, B),
    "ce_count_loss": lambda x: loss.ce_count_loss(x, B),
    "ce_max_membrane_loss": lambda x: loss.ce_max_membrane_loss(x, B),
    "mse_count_loss": lambda x: loss.mse_count_loss(x, B),
    "mse_membrane_loss": lambda x: loss.mse_membrane_loss(x, B),
    "l1_rate_sparsity": loss.l1_rate_sparsity,
    "targets": lambda x: loss.ce_rate_loss(X, x),
    "spectral_radius": spectral_radius,
    "PSN": PSN(4),
    "SlidingPSN": SlidingPSN(2),
    "Delay": Delay(1),
    "SharedDropout": SharedDropout(),
    "SharedDropout in evaluation": SharedDropout().eval(),
}
FURTHER_CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "OverTime, a pair out": (
        lambda: OverTime(Pair())(X),
        TypeError,
        "Pair inside of OverTime returns a tuple; .*one tensor",
    ),
    "OverTime, an LSTM": (lambda: OverTime(nn.LSTM(5, 5))(X), TypeError, "LSTM inside of OverTime returns a tuple"),
    "OverTime, a pair in": (
        lambda: OverTime(First())((X, X)),
        TypeError,
        r"OverTime got a tuple; it takes one tensor.*flatten",
    ),
    "OverTime, two in": (
        lambda: OverTime(nn.Bilinear(5, 5, 5))(X, X),
        TypeError,
        "OverTime got 2 inputs; it takes one",
    ),
    "OverTime, another batch": (
        lambda: OverTime(nn.Flatten(0))(X),
        ValueError,
        r"return the shape \[40\] for a batch of 8",
    ),
    "OverTime, a Delay": (lambda: OverTime(Delay(1)), ValueError, r"layer 0 keeps a state \(Delay\).*after OverTime"),
    "SEWBlock, an instance": (
        lambda: SEWBlock(4, 4, shared),
        ValueError,
        "neuron is an instance of LIF; .*give a function",
    ),
    "MSBlock, an instance": (
        lambda: MSBlock(4, 4, shared),
        ValueError,
        "neuron is an instance of LIF; .*give a function",
    ),
    "SEWBlock, a name": (lambda: SEWBlock(4, 4, wrong("LIF")), ValueError, "neuron is 'LIF'; .*give a function"),
    "SEWBlock, one for all": (lambda: SEWBlock(4, 4, lambda: shared), ValueError, "returned the same instance twice"),
    "SEWBlock, none": (lambda: SEWBlock(4, 4, wrong(lambda: None)), ValueError, r"neuron\(\) returned None"),
    "SEWBlock, a float": (
        lambda: SEWBlock(wrong(4.0), 4, LIF),
        ValueError,
        "in_channels is 4.0; it must be a whole number",
    ),
    "MSBlock, no stride": (lambda: MSBlock(4, 4, LIF, stride=0), ValueError, "stride is 0; it must be a whole number"),
    "RLIF, a name": (
        lambda: RLIF(8, init=wrong("orthogonal")),
        ValueError,
        r"init is 'orthogonal'.*as torch\.nn\.init\.orthogonal_",
    ),
    "noise": (lambda: setattr(StochasticLIF(), "noise", "pink"), ValueError, "unknown noise 'pink'; known: 'logistic'"),
    "states, a number": (
        lambda: setattr(LIF(), "states", 3),
        TypeError,
        "states is a int; give a list of num_states=1",
    ),
    "states of a Delay": (lambda: setattr(Delay(1), "states", 3), TypeError, "states is a int; give a list of tensors"),
    "step, None": (lambda: LIF().step(wrong(None)), TypeError, "inputs is a NoneType; give a tensor"),
    "set_states, a list": (
        lambda: F.set_states(LIF(), wrong([X])),
        TypeError,
        "states is a list; give the result of get_states",
    ),
    "set_backend, a name": (
        lambda: F.set_backend(LIF(), "cpp", wrong("LIF")),
        TypeError,
        "instance is 'LIF'; give a class of neurons",
    ),
    "a monitor's layers": (
        lambda: SpikeMonitor(LIF(), "LIF"),
        TypeError,
        r"layers is the string 'LIF'; give a list of names",
    ),
    "no time": (
        lambda: LIF()(torch.tensor(1.0)),
        ValueError,
        r"no dimensions; in step mode 'm' it is a sequence \[T, \*step\]",
    ),
    "a Delay without time": (lambda: Delay(1)(torch.tensor(1.0)), ValueError, r"has shape \[\]; it needs at least 1"),
    "a neuron's device": (
        lambda: ParametricLIF()(X.to("meta")),
        DeviceError,
        r"w is on cpu and input 0 on meta: .*neuron\.to",
    ),
    "its tensors' device": (
        lambda: LIF(v_threshold=torch.rand(5))(X.to("meta")),
        DeviceError,
        "v_threshold is on cpu and input 0",
    ),
    "the input's device": (lambda: ParametricLIF().to("meta")(X), DeviceError, "w is on meta and input 0 on cpu"),
    "PSN's device": (lambda: PSN(4)(X.to("meta")), DeviceError, "weight is on cpu and the input on meta"),
    "a Delay's device": (
        lambda: Delay(torch.rand(5))(X.to("meta")),
        DeviceError,
        "delay is on cpu and the input on meta",
    ),
}
CASES = {
    **{f"{name} {i}": case for name, f in NETS.items() for i, case in enumerate(list_wrong_nets(f))},
    **{f"{name} {i}": case for name, f in TENSORS.items() for i, case in enumerate(list_wrong_tensors(f))},
    **FURTHER_CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_the_remedy(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


# -- networks ----------------------------------------------------------------------------------------------------------


def test_one_neuron_in_two_places_is_reported() -> None:
    net = nn.Sequential(nn.Linear(5, 7), shared, nn.Linear(7, 3), shared)
    with pytest.warns(SharedStateWarning):
        F.reset_net(net)
    with pytest.raises(ValueError, match="one instance is in two places of a network, give each place"):
        net(X)
    F.reset_net(net)


@pytest.mark.parametrize("backend", ["torch", "hop", "cpp"])
@pytest.mark.parametrize("make", [LIF, ParametricLIF, RLIF], ids=["LIF", "ParametricLIF", "RLIF"])
@pytest.mark.long(all_but=["ParametricLIF-torch", "LIF-hop", "RLIF-cpp", "LIF-cpp"])
def test_a_forgotten_reset_is_reported(make: Callable[..., nn.Module], backend: str) -> None:
    neuron = make(5, backend=backend) if make is RLIF else make(backend=backend)
    net = nn.Sequential(nn.Linear(5, 5), neuron)
    net(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"the graph of an earlier step: reset it .*reset_net.*detach_net"):
        net(X).sum().backward()
    for cut_graph in (F.reset_net, F.detach_net):
        cut_graph(net)
        net(X).sum().backward()


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_retained_graphs_may_be_traversed_again(backend: str) -> None:
    """Checks second backwards through retained graphs, and through graphs that store nothing."""
    neuron = ParametricLIF(backend=backend)
    x = X.clone().requires_grad_()
    neuron(x).sum().backward(retain_graph=True)
    neuron(x).sum().backward()
    neuron.reset()
    (neuron(x) + neuron(x)).sum().backward()
    neuron.reset()
    loop = LIF(backend="torch")
    first = loop(x)
    second = loop(x)
    second.sum().backward(retain_graph=True)
    first.sum().backward()


@pytest.mark.parametrize("backend", ["torch", "hop", "cpp"])
@pytest.mark.parametrize("step_mode", ["m", "s"])
def test_a_state_from_inference_mode_continues_in_training(backend: str, step_mode: str) -> None:
    neuron = ParametricLIF(backend=backend, step_mode=step_mode)
    x = X.clone().requires_grad_()
    with torch.inference_mode():
        neuron(X)
        states = list(neuron.states)
    neuron(x).sum().backward()
    first, x.grad = x.grad, None
    output, _ = neuron.step(x, states)
    output.sum().backward()
    assert first is not None
    assert first.abs().sum() > 0
    torch.testing.assert_close(x.grad, first)


def test_synapses_are_counted_for_keyword_arguments() -> None:
    linear = nn.Linear(5, 3)
    spikes = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]])
    with SynapseMonitor(linear) as monitor:
        linear(input=spikes)
    assert monitor.total().accumulates == 6
