"""`torch.export`: programs without a state, or with the state as an argument and as a result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from flexsn_nn import ALIF, LIF, RLIF, ExportError, FlexSN
from flexsn_nn.functional import reset_net

backends = pytest.mark.parametrize("backend", ["torch", "hop"])
strictness = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


class Network(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.neuron = LIF(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = self.neuron(3.0 * self.linear(x))
        return spikes * 2.0


class Repeated(nn.Module):
    """Calls one neuron several times, with parts of a sequence or with single steps."""

    def __init__(self, neuron: nn.Module, part: int) -> None:
        super().__init__()
        self.neuron, self.part = neuron, part

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.part) if self.neuron.step_mode == "m" else x
        return torch.stack([self.neuron(part).mean(0) for part in parts])


NEURONS: dict[str, Callable[[], FlexSN]] = {
    "LIF": lambda: LIF(),
    "loop": lambda: LIF(backend="torch"),
    "steps": lambda: LIF(step_mode="s"),
    "RLIF": lambda: RLIF(5),
    "two states": lambda: ALIF(),
    "FlexSN": lambda: FlexSN(lambda x, v: (x + v, x + v), 1, 1, 1),
}
neurons = pytest.mark.parametrize("neuron", list(NEURONS))


class WithState(Network):
    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        spikes, (v,) = self.neuron.step(3.0 * self.linear(x), [v])
        return spikes, v


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long(all_but=["strict-hop", "non-strict-torch"])
@backends
@strictness
def test_an_exported_network_begins_at_the_initial_state(backend: str, strict: bool) -> None:
    network, x = Network(backend), torch.randn(4, 2, 6)
    program = torch.export.export(network, (x,), strict=strict)
    assert network.neuron.states == [], "the export leaves no state"
    other = torch.randn(4, 2, 6)
    expected = network(other)
    assert 0 < expected.count_nonzero() < expected.numel()
    for _ in range(2):
        assert torch.equal(program.module()(other), expected)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if backend == "hop":
        assert sum("flex_sn_scan" in str(node.target) for node in calls) == 1


@strictness
def test_an_exported_step_receives_and_returns_its_state(strict: bool) -> None:
    network, x = WithState("hop"), torch.randn(6, 2, 6)
    program = torch.export.export(network, (x[:3], torch.zeros(2, 5)), strict=strict).module()
    spikes, v = program(x[:3], torch.zeros(2, 5))
    later_spikes, v = program(x[3:], v)
    expected, final = network(x, torch.zeros(2, 5))
    assert torch.equal(torch.cat([spikes, later_spikes]), expected)
    assert torch.equal(v, final)


@strictness
def test_an_exported_network_accepts_any_number_of_steps(strict: bool) -> None:
    network = Network("hop")
    steps = torch.export.Dim("steps", min=2, max=1000)
    program = torch.export.export(network, (torch.randn(4, 2, 6),), dynamic_shapes=({0: steps},), strict=strict)
    for count in (3, 9):
        network.neuron.reset()
        x = torch.randn(count, 2, 6)
        assert torch.equal(program.module()(x), network(x))


def test_an_export_that_would_lose_a_state_is_refused() -> None:
    network, x = Network("hop"), torch.randn(4, 2, 6)
    network(x)
    with pytest.raises(ExportError, match=r"reset\(\) before exporting.*neuron\.step\(inputs, states\)"):
        torch.export.export(network, (x,), strict=False)
    assert issubclass(ExportError, RuntimeError)


@pytest.mark.long(all_but=["LIF", "steps"])
@neurons
def test_several_calls_in_one_program_continue_from_the_state(neuron: str) -> None:
    torch.manual_seed(0)
    net, x = Repeated(NEURONS[neuron](), 3), 2.0 * torch.rand(6, 20, 5)
    expected = net(x)
    net.neuron.reset()  # type: ignore[operator]
    without_state = torch.cat([net(part)[:1] for part in x.split(3) if net.neuron.reset() is None])  # type: ignore[operator]
    assert not torch.equal(expected[-len(without_state) :], without_state), "the state matters"
    for _ in range(2):  # An export does not affect the next export.
        net.neuron.reset()  # type: ignore[operator]
        program = torch.export.export(net, (x,), strict=False).module()
        assert net.neuron.states == []
        for _ in range(2):
            torch.testing.assert_close(program(x), expected)
    torch.testing.assert_close(net(x), expected)


def test_a_neuron_in_a_closure_continues_only_in_one_program() -> None:
    neuron, x = LIF(), 2.0 * torch.rand(6, 2, 5)

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([neuron(part) for part in x.split(3)])

    for _ in range(2):
        program = torch.export.export(Hidden(), (x,), strict=False).module()
        neuron.reset()
        assert torch.equal(program(x), neuron(x))
        neuron.reset()
    pickle.loads(pickle.dumps(neuron))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_a_reset_between_two_calls_of_one_program_is_exported() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = LIF()

        def forward(self, x: Tensor) -> Tensor:
            first = self.neuron(x)
            reset_net(self)
            return torch.cat([first, self.neuron(x)])

    net, x = Twice(), 2.0 * torch.rand(3, 2, 5)
    expected = net(x)
    net.neuron.reset()
    for strict in (False, True):
        assert torch.equal(torch.export.export(net, (x,), strict=strict).module()(x), expected)


@pytest.mark.long(all_but=["LIF", "steps"])
@neurons
def test_a_strict_export_refuses_a_second_call_of_a_neuron(neuron: str) -> None:
    net, x = Repeated(NEURONS[neuron](), 3), 2.0 * torch.rand(6, 2, 5)
    for _ in range(2):
        with pytest.raises(Exception, match=r"a second time in one program.*strict=False"):
            torch.export.export(net, (x,), strict=True)
    net.part = 6
    if neuron != "steps":
        torch.testing.assert_close(torch.export.export(net, (x,), strict=True).module()(x), net(x))
