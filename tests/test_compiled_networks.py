"""Compiled networks on the CPU. They equal the loop, their code has the same size for all lengths, and second
derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from scan_cores import CASES, hard_spike, problem
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from flexsn_hop import eager_scan, eager_scan_final_state, flex_sn_scan, flex_sn_scan_final_state
from flexsn_nn import FlexSN

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

LIF = CASES[1].make(hard_spike, [])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def compute_results_and_gradients(
    run: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], *arguments: Tensor
) -> Any:
    """Returns the results of a call, and the gradients of a randomly weighted sum of these results."""
    results = run(*arguments)
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(r * torch.randn(r.shape, generator=generator)).sum() for r in results]).sum()
    return [r.detach() for r in results], torch.autograd.grad(loss, leaves)


@pytest.mark.long(all_but=["aot_eager-dynamic"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_all_cores_in_one_network_equal_the_loop(backend: str, dynamic: bool) -> None:
    """Tests one graph of eleven scans, which takes about as long to compile as a graph of one scan."""
    problems = [problem(case, 5, (4, 6), seed=i) for i, case in enumerate(CASES)]

    def network(final: Any, sequence: Any, *flat: Tensor) -> list[Tensor]:
        arguments, results = iter(flat), []
        for i, p in enumerate(problems):
            values = [next(arguments) for _ in (*p.inputs, *p.states)]
            results += (final if i % 2 else sequence)(p.core, *p.counts, *values)
        return results

    operator = partial(network, flex_sn_scan_final_state, flex_sn_scan)
    compiled = torch.compile(operator, fullgraph=True, dynamic=dynamic, backend=backend)
    for steps in (5, 9) if dynamic else (5,):
        longer_problems = [problem(case, steps, (4, 6), seed=i) for i, case in enumerate(CASES)]
        leaves = [
            leaf
            for p, q in zip(longer_problems, problems, strict=True)
            for leaf in (*p.inputs, *p.states, *q.parameters)
        ]
        flat = [t for p in longer_problems for t in (*p.inputs, *p.states)]
        actual = compute_results_and_gradients(compiled, leaves, *flat)
        expected = compute_results_and_gradients(partial(network, eager_scan_final_state, eager_scan), leaves, *flat)
        torch.testing.assert_close(actual, expected)


@pytest.mark.long
def test_compiled_code_does_not_depend_on_the_length() -> None:
    programs = []
    for steps in (4, 64, 1024):
        torch._dynamo.reset()
        run = torch.compile(lambda x, v: 0.5 * flex_sn_scan(LIF, 1, 1, 1, 2.0 * x + 0.1, v)[0], fullgraph=True)
        x, v = torch.randn(steps, 8, 16, requires_grad=True), torch.zeros(8, 16)
        _, sources = run_fw_bw_and_get_code(partial(run, x, v))
        programs.append([len(source.splitlines()) for source in sources])
    assert len(programs[0]) == 2  # forward and backward
    assert programs == [programs[0]] * 3


def test_gradients_of_gradients_are_refused() -> None:
    x, v = torch.randn(3, 4, requires_grad=True), torch.zeros(4)
    run = torch.compile(partial(flex_sn_scan, LIF, 1, 1, 1), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(run(x, v)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


class SpikingVGG(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)])
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)
        self.neurons = nn.ModuleList([FlexSN(LIF, 1, 1, 1, backend=backend) for _ in range(3)])

    def spikes(self, index: int, x: Tensor) -> Tensor:
        neuron = self.neurons[index]
        assert isinstance(neuron, FlexSN)
        neuron.reset()
        result = neuron(x)
        assert isinstance(result, Tensor)
        return result

    def forward(self, x: Tensor) -> Tensor:
        for index, convolution in enumerate(self.convolutions):
            x = self.spikes(index, convolution(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
            x = nn.functional.max_pool2d(x.flatten(0, 1), 2).unflatten(0, x.shape[:2])
        result: Tensor = self.last(self.spikes(2, self.first(x.flatten(2)))).mean(0)
        return result


@pytest.mark.long(all_but=["auto"])
@pytest.mark.parametrize("lowering", ["auto", "loop", "scan", "while_loop"])
def test_modules_in_one_graph_equal_the_loop_without_gradients(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", lowering)
    x = 3.0 * torch.randn(4, 2, 1, 10, 10)
    with torch.no_grad():
        expected = SpikingVGG("torch")(x)
        result = torch.compile(SpikingVGG("hop"), fullgraph=True, backend="aot_eager")(x)
    assert expected.std() > 0
    torch.testing.assert_close(result, expected)


def test_inductor_compiles_the_while_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSN_HOP_LOWERING", "while_loop")
    network = nn.Sequential(nn.Linear(5, 6), FlexSN(LIF, 1, 1, 1, backend="hop"), nn.Linear(6, 2))
    reference = nn.Sequential(network[0], FlexSN(LIF, 1, 1, 1, backend="torch"), network[2])
    x = 3.0 * torch.randn(4, 3, 5)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(network, fullgraph=True)(x), reference(x))
