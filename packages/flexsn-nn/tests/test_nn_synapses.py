"""Synaptic operations: comparison with counts in loops, and with SpikingJelly's counter on an equal network."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import IF, LIF, OverTime, ParameterError, UnknownNameError, functional
from flexsn_nn.monitor import RateMonitor, SynapseMonitor, SynapticOperations

pytestmark = pytest.mark.usefixtures("loops")

T, B = 4, 2
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3), (5,)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 7)),
    "conv2d": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)),
    "conv2d_dilated": (nn.Conv2d(2, 4, (3, 2), stride=(1, 2), dilation=2, padding=(2, 0), bias=False), (2, 6, 7)),
    "conv2d_same": (nn.Conv2d(2, 2, 3, padding="same"), (2, 4, 4)),
    "conv2d_around": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 4)),
}


def draw_spikes(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3).float()


def count_by_hand(layer: Any, x: Tensor) -> int:
    """Sums, over all spikes, the outputs that a single spike changes if all weights are 1."""
    values = [p.data.clone() for p in layer.parameters()]
    for parameter in layer.parameters():
        parameter.data = torch.ones_like(parameter)
    bias = layer(torch.zeros_like(x))
    total = 0.0
    for index in itertools.product(*map(range, x.shape)):
        if x[index]:
            single_spike = torch.zeros_like(x)
            single_spike[index] = 1
            total += (layer(single_spike) - bias).sum().item()
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.data = value
    return round(total)


@pytest.mark.parametrize("name", LAYERS)
def test_counts_of_synapses_equal_counts_by_hand(name: str) -> None:
    layer, shape = LAYERS[name]
    x = draw_spikes(B, *shape)
    expected = count_by_hand(layer, x)
    dense = count_by_hand(layer, torch.ones_like(x))
    with SynapseMonitor(layer) as monitor:
        layer(x)
    assert monitor.total() == SynapticOperations(expected, 0, dense)
    assert 0 < expected < dense
    with SynapseMonitor(layer) as monitor:
        layer(x / 2)  # These values are not spikes, so each weight causes one multiplication.
    assert monitor.total() == SynapticOperations(0, dense, dense)


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OverTime(nn.Conv2d(1, 4, 3, padding=1)),
        IF(v_threshold=0.3),
        OverTime(nn.Conv2d(4, 6, 3, stride=2)),
        LIF(v_threshold=0.2),
        nn.Flatten(2),
        nn.Linear(6 * 3 * 3, 5),
        LIF(v_threshold=0.2),
    )


def test_operations_of_a_network_add_up_over_calls() -> None:
    net = make_network()
    x = torch.rand(T, B, 1, 8, 8)
    rates = RateMonitor(net)
    with SynapseMonitor(net) as monitor:
        net(x)
        operations = monitor.operations()
        functional.reset_net(net)
        net(x)
    net(x)  # The monitor no longer counts this call.
    assert list(operations) == ["0.0", "2.0", "5"]
    assert operations["0.0"].accumulates == 0
    assert operations["0.0"].multiplies == operations["0.0"].dense == T * B * 4 * (3 * 3 * 8 * 8 - 4 * 8 * 3 + 4)
    functional.reset_net(net)
    spikes_of_layer = net[:4](x)
    assert operations["5"].accumulates == 5 * int(spikes_of_layer.sum())
    assert {n: (o.accumulates, o.multiplies) for n, o in monitor.operations().items()} == {
        n: (2 * o.accumulates, 2 * o.multiplies) for n, o in operations.items()
    }
    total = monitor.total()
    assert total.energy() == pytest.approx(0.9 * total.accumulates + 4.6 * total.multiplies)
    assert total.energy(accumulate=1.0, multiply=0.0) == total.accumulates
    assert 0 < rates.rates()["3"] < 1
    monitor.clear()
    assert monitor.operations() == {}


def test_layers_are_selected_by_name() -> None:
    net = make_network()
    with SynapseMonitor(net, ["5"]) as monitor:
        net(torch.rand(T, B, 1, 8, 8))
    assert list(monitor.operations()) == ["5"]
    with pytest.raises(UnknownNameError, match="unknown layer '6'"):
        SynapseMonitor(net, ["6"])
    with pytest.raises(ParameterError, match="no linear layer"):
        SynapseMonitor(IF())


def test_counting_changes_no_result_and_is_exact_under_autocast() -> None:
    net = make_network()
    x = torch.rand(T, B, 1, 8, 8)
    expected = net(x)
    functional.reset_net(net)
    keys = list(net.state_dict())
    with SynapseMonitor(net) as monitor:
        assert torch.equal(net(x), expected)
        assert list(net.state_dict()) == keys
    layer = nn.Conv2d(600, 2, 3, padding=1)
    dense = torch.ones(1, 600, 3, 3)
    with SynapseMonitor(layer) as monitor, torch.autocast("cpu", dtype=torch.bfloat16):
        layer(dense)
    # 5400 weights meet at the middle, but bfloat16 can count only to 256.
    assert monitor.total().accumulates == 600 * 2 * (9 + 4 * 6 + 4 * 4)


def test_layers_with_a_parametrised_weight_are_counted() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 2))
    with SynapseMonitor(nn.Sequential(conv, nn.Flatten(), layer)) as monitor:
        layer(torch.ones(2, 4))
        conv(torch.ones(1, 1, 3, 3))
    assert monitor.total().accumulates == 2 * 4 * 3 + 2 * 16


def test_counts_equal_those_of_spikingjelly() -> None:
    counters: Any = pytest.importorskip(
        "spikingjelly.activation_based.op_counter", reason="SpikingJelly is not installed"
    )
    neuron: Any = pytest.importorskip("spikingjelly.activation_based.neuron")
    layers: Any = pytest.importorskip("spikingjelly.activation_based.layer")
    ours = make_network()
    theirs = nn.Sequential(
        layers.Conv2d(1, 4, 3, padding=1, step_mode="m"),
        neuron.IFNode(v_threshold=0.3, step_mode="m"),
        layers.Conv2d(4, 6, 3, stride=2, step_mode="m"),
        neuron.LIFNode(v_threshold=0.2, step_mode="m"),
        nn.Flatten(2),
        layers.Linear(6 * 3 * 3, 5),
        neuron.LIFNode(v_threshold=0.2, step_mode="m"),
    )
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        a.data = b.data.clone()
    counter = counters.SynOpCounter()
    x = draw_spikes(T, B, 1, 8, 8)
    recorded: dict[str, float] = {}
    for name, module in theirs.named_modules():
        if isinstance(module, neuron.BaseNode):
            # SpikingJelly's own monitor would import tensorboard; this hook computes an equal mean.
            module.register_forward_hook(lambda m, i, out, name=name: recorded.update({name: out.mean().item()}))
    with torch.no_grad(), counters.DispatchCounterMode([counter]):
        theirs(x)
    with SynapseMonitor(ours) as monitor, RateMonitor(ours) as rates:
        ours(x)
    counts = counter.get_counts()
    pairs = {"0.0": "Sequential.0", "2.0": "Sequential.2", "5": "Sequential.5"}
    assert {n: o.accumulates for n, o in monitor.operations().items()} == {
        name: sum(counts[theirs_name].values()) for name, theirs_name in pairs.items()
    }
    assert monitor.total().accumulates == counter.get_total() > 0
    for name, rate in rates.rates().items():
        assert rate == pytest.approx(recorded[name], rel=1e-6)
    assert rates.rates()["1"] > 0
    assert rates.rates()["3"] > 0
