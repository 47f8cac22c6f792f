"""`functional.stateless`, whose modules receive and return states; `functional.parameter_groups`; printed monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsn_nn import (
    ALIF,
    CUBALIF,
    IF,
    LI,
    LIF,
    PLIF,
    RLIF,
    FlexSN,
    Izhikevich,
    Leaky,
    OverTime,
    Recurrent,
    StateError,
    functional,
    monitor,
)
from flexsn_nn.layer import Delay, SEWBlock, SharedDropout
from flexsn_nn.neuron import SlidingPSN

pytestmark = pytest.mark.usefixtures("loops")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.joint = LIF(), ALIF(), RLIF(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = self.joint(self.first(x) + self.second(y))
        return output


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 6), LIF(), nn.Linear(6, 4), RLIF(4), nn.Linear(4, 4), LI(2.0)),
    "starts elsewhere": lambda: nn.Sequential(Izhikevich(), LIF(v_reset=-0.25), Recurrent(CUBALIF(), 4)),
    "delays": lambda: nn.Sequential(Delay(2), LIF(), SlidingPSN(3), SharedDropout(0.5), Delay(0), Leaky(0.75)),
    "one neuron": lambda: FlexSN(lambda x, u, v: (x + u, u + v, x), 1, 2, 1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_of_steps_equals_a_sequence(name: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]().eval()
    x = torch.rand(9, 3, 4) * 3
    expected = net(x)
    functional.reset_net(net)
    net(x[:2])  # `stateless` must not change these states of the network.
    own_states = functional.get_states(net)
    module = functional.stateless(net)
    states = module.initial_states(x)
    first, states = module(x[:4], states)
    rest, states = module(x[4:], states)
    assert torch.equal(torch.cat([first, rest]), expected)
    assert torch.equal(module(x)[0], expected), "without states, the module starts with the initial states"
    assert all(
        torch.equal(a, b) for k, v in functional.get_states(net).items() for a, b in zip(v, own_states[k], strict=True)
    )
    functional.set_step_mode(net, "s")
    states = module.initial_states(x[0])
    outputs = []
    for step in x:
        output, states = module(step, states)
        outputs.append(output)
    assert torch.equal(torch.stack(outputs), expected)


def test_gradients_flow_through_states_and_several_inputs() -> None:
    torch.manual_seed(0)
    net = TwoInputs()
    module = functional.stateless(net)
    x, y = torch.rand(6, 2, 4) * 3, torch.rand(6, 2, 4) * 3
    x.requires_grad_()
    states = module.initial_states((x, y))
    first, states = module((x[:3], y[:3]), states)
    second, states = module((x[3:], y[3:]), states)
    torch.cat([first, second]).sum().backward()
    gradient = x.grad
    x.grad = None
    net(x, y).sum().backward()
    assert gradient is not None
    assert gradient[:3].any()
    torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("mode", ["m", "s"])
@pytest.mark.parametrize("name", ["layers", "delays"])
def test_an_exported_program_receives_and_returns_states(name: str, mode: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]().eval()
    module = functional.stateless(net)
    x = torch.rand(8, 3, 4) * 3
    with torch.no_grad():
        expected, _ = module(x)
        functional.set_step_mode(net, mode)
        example = x[:4] if mode == "m" else x[0]
        states = module.initial_states(example)
        program = torch.export.export(module, (example, states)).module()
        assert all(not layer for layer in functional.get_states(net).values()), "the export leaves no states"
        outputs = []
        for part in (x[:4], x[4:]) if mode == "m" else x:
            output, states = program(part, states)
            outputs.append(output)
    output_sequence = torch.cat(outputs) if mode == "m" else torch.stack(outputs)
    assert expected.any()
    torch.testing.assert_close(output_sequence, expected)


def test_a_stateless_network_compiles() -> None:
    net = nn.Sequential(nn.Linear(4, 6), LIF(backend="torch"))
    module = functional.stateless(net)
    x = torch.rand(4, 3, 4) * 3
    states = module.initial_states(x)
    expected, (v,) = module(x, states)
    output, (new_v,) = torch.compile(module, backend="eager")(x, states)
    assert torch.equal(output, expected)
    assert torch.equal(new_v, v)
    assert net[1].states == []


def test_wrong_states_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 6), LIF())
    module, x = functional.stateless(net), torch.rand(2, 3, 4)
    with pytest.raises(StateError, match="got 2 states; the network has 1"):
        module(x, [torch.zeros(3, 6)] * 2)
    with pytest.raises(StateError, match="initial_states"):
        functional.stateless(nn.Sequential(Delay(2)))(x, [])
    with pytest.raises(StateError, match="eval"):
        functional.stateless(nn.Sequential(SharedDropout()))(x)
    net.unused = IF()
    net.forward = lambda x: net[1](net[0](x))  # type: ignore[method-assign]
    with pytest.raises(StateError, match="did not call unused"):
        functional.stateless(net).initial_states(x)


# -- groups of parameters -------------------------------------------------------------------------------------------


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fading, self.V = nn.Parameter(torch.zeros(4, 1, 1)), nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x, v


def test_parameters_of_neurons_are_a_group() -> None:
    shared = PLIF()
    recurrent = RLIF(4, tau=nn.Parameter(torch.full((4,), 2.0)))
    element_by_element = Recurrent(PLIF(), 4, all_to_all=False)
    custom = FlexSN(Core(), 1, 1, 1)
    net = nn.ModuleList(
        [nn.Linear(4, 4), shared, shared, recurrent, element_by_element, custom, OverTime(nn.BatchNorm1d(4))]
    )
    weight_group, neuron_group = functional.parameter_groups(net, tau_lr=0.5, betas=(0.8, 0.9))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert [names[id(p)] for p in neuron_group["params"]] == ["1.w", "3.tau", "4.neuron.w", "5.core.fading"]
    assert len(weight_group["params"]) + len(neuron_group["params"]) == len(names)
    assert {"4.recurrent.V", "3.recurrent.weight", "5.core.V"} <= {names[id(p)] for p in weight_group["params"]}
    optimizer = torch.optim.AdamW([weight_group, neuron_group], lr=0.1, weight_decay=0.2)
    options = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert options == [(0.1, 0.2, (0.9, 0.999)), (0.5, 0.0, (0.8, 0.9))]


def test_empty_groups_are_omitted() -> None:
    assert len(functional.parameter_groups(nn.Sequential(nn.Linear(2, 2), LIF()))) == 1
    (group,) = functional.parameter_groups(PLIF(), weight_decay=0.1)
    assert group["weight_decay"] == 0.1
    assert "lr" not in group


# -- printed monitors -----------------------------------------------------------------------------------------------


def test_monitors_print_their_records() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 3), IF(), nn.Linear(3, 2), LI())
    with (
        monitor.RateMonitor(net) as rates,
        monitor.SpikeMonitor(net, ["1"]) as spikes,
        monitor.SynapseMonitor(net) as synapses,
    ):
        assert "nothing was recorded yet" in repr(rates)
        with torch.no_grad():
            net[0].weight.fill_(1.0)
            net[0].bias.zero_()
            net(torch.ones(4, 1, 2))
        lines = repr(rates).splitlines()
    assert lines[0] == "RateMonitor"
    assert lines[1].split() == ["layer", "kind", "value", "of"]
    assert lines[2].split() == ["1", "IF", "1", "spikes", "per", "neuron", "and", "step"]
    assert lines[3].endswith("mean output"), "a readout has no rate"
    assert "[4, 1, 3]" in repr(spikes)
    assert repr(spikes).startswith("SpikeMonitor, stopped")
    assert "24" in repr(synapses)


def test_a_stream_through_a_block_equals_a_sequence() -> None:
    torch.manual_seed(0)
    net = SEWBlock(2, 2, LIF).eval()
    module, x = functional.stateless(net), torch.rand(4, 1, 2, 5, 5) * 3
    expected, states = module(x)
    first, states = module(x[:1], module.initial_states(x))
    assert torch.equal(torch.cat([first, module(x[1:], states)[0]]), expected)
