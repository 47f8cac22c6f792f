"""A neuron in `torch.compile`: one graph with the loop or the operator, and correct reports about kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from nn_equations import CASES, Case, draw_input
from torch import Tensor, nn

from flexsn_nn import LIF, FlexSN


def leaky(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    hard, soft = (h >= 1.0).to(h.dtype), torch.sigmoid(4.0 * (h - 1.0))
    spike = hard.detach() + (soft - soft.detach())
    return spike, h * (1.0 - spike)


class Network(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.neuron = FlexSN(leaky, 1, 1, 1, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset()
        spikes: Tensor = self.neuron(3.0 * self.linear(x))
        return 2.0 * spikes


def compute_gradients(network: Any, x: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    result = network(x)
    return result, torch.autograd.grad(result.sum(), parameters)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Dynamo reads the gradients of tensors that cross a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("backend", "fullgraph"), [("torch", True), ("hop", True), ("triton", False)])
def test_a_compiled_network_equals_the_eager_network(backend: str, fullgraph: bool, interpreted: None) -> None:
    network = Network(backend)
    x = torch.randn(4, 7, 6)
    parameters = list(network.parameters())
    compiled = torch.compile(network, backend="aot_eager", fullgraph=fullgraph)
    result, grads = compute_gradients(compiled, x, parameters)
    expected, expected_grads = compute_gradients(network, x, parameters)
    assert torch.equal(result, expected)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize(("backend", "lowering"), [("hop", "auto"), ("hop", "while_loop"), ("torch", "auto")])
def test_a_compiled_neuron_continues_from_its_state(
    backend: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also checks calls without state sequences and without gradients, as `while_loop` requires."""
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", lowering)
    x = 3.0 * torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    plain, neuron = LIF(backend="torch"), LIF(backend=backend)
    compiled = torch.compile(neuron, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for part in (x, -x, x):
            assert torch.equal(compiled(part), plain(part))
            assert [torch.equal(a, b) for a, b in zip(neuron.states, plain.states, strict=True)] == [True]


def test_one_graph_with_kernels_is_refused_with_a_reason(interpreted: None) -> None:
    network = torch.compile(Network("triton"), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="for one graph, use backend='hop'"):
        network(torch.randn(4, 7, 6))


@pytest.mark.long(all_but=["-0.5", "None"])
@pytest.mark.parametrize("v_reset", [0.0, -0.5, None])
def test_symbolic_sizes_and_attributes_give_equal_outputs(v_reset: float | None) -> None:
    """Checks that `dynamic=True`, for which Dynamo makes symbols of a neuron's attributes, gives equal outputs."""
    neuron = LIF(v_reset=v_reset, tau=3.0, backend="hop")
    compiled = torch.compile(neuron, backend="aot_eager", fullgraph=True, dynamic=True)
    for steps in (5, 6):
        x = 6 * torch.rand(steps, 4, 3)
        neuron.reset()
        output = compiled(x)
        assert 0 < output.count_nonzero() < output.numel()
        neuron.reset()
        assert torch.equal(output, neuron(x))


# One case of each class. Other cases of a class have attributes of the same types.
CASE_BY_CLASS = list({type(case.make()): case for case in CASES}.values())


@pytest.mark.long(all_but=["lif_soft_detached", "plif_raw", "stochastic"])
@pytest.mark.parametrize("case", CASE_BY_CLASS, ids=lambda case: case.name)
def test_every_neuron_accepts_symbolic_sizes(case: Case) -> None:
    neuron = case.make(backend="hop")
    compiled = torch.compile(neuron, backend="aot_eager", fullgraph=True, dynamic=True)
    x = draw_input(case, 5, (4, 35)).detach().requires_grad_()
    output = compiled(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    neuron.reset()
    expected = neuron(x)
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])
