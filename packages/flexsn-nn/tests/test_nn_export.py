"""`torch.export`: a program without a state, or with the state as an argument and a result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from flexsn_nn import LIF, ExportError

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
def test_a_network_begins_at_the_initial_state(backend: str, strict: bool) -> None:
    network, x = Network(backend), torch.randn(4, 2, 6)
    program = torch.export.export(network, (x,), strict=strict)
    assert network.neuron.states == [], "nothing of the export stays"
    other = torch.randn(4, 2, 6)
    wanted = network(other)
    assert 0 < wanted.count_nonzero() < wanted.numel()
    for _ in range(2):
        assert torch.equal(program.module()(other), wanted)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if backend == "hop":
        assert sum("flex_sn_scan" in str(node.target) for node in calls) == 1


@strictness
def test_a_state_in_and_out(strict: bool) -> None:
    network, x = WithState("hop"), torch.randn(6, 2, 6)
    program = torch.export.export(network, (x[:3], torch.zeros(2, 5)), strict=strict).module()
    spikes, v = program(x[:3], torch.zeros(2, 5))
    more, v = program(x[3:], v)
    wanted, final = network(x, torch.zeros(2, 5))
    assert torch.equal(torch.cat([spikes, more]), wanted)
    assert torch.equal(v, final)


@strictness
def test_any_number_of_steps(strict: bool) -> None:
    network = Network("hop")
    steps = torch.export.Dim("steps", min=2, max=1000)
    program = torch.export.export(network, (torch.randn(4, 2, 6),), dynamic_shapes=({0: steps},), strict=strict)
    for count in (3, 9):
        network.neuron.reset()
        x = torch.randn(count, 2, 6)
        assert torch.equal(program.module()(x), network(x))


def test_a_state_that_would_be_forgotten_is_refused() -> None:
    network, x = Network("hop"), torch.randn(4, 2, 6)
    network(x)
    with pytest.raises(ExportError, match=r"reset\(\) before exporting.*neuron\.step\(inputs, states\)"):
        torch.export.export(network, (x,), strict=False)
    assert issubclass(ExportError, RuntimeError)
