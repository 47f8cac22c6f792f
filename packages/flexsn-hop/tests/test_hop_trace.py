"""make_fx and torch.export record the operator as one node for any number of steps."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch._inductor
from hop_alone import no_kernels  # noqa: F401  a fixture
from hop_cores import CASES, function_spike, plif_core
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn_hop import eager_scan, flex_sn_scan, flex_sn_scan_final_state

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Torch issues warnings while it loads and packages an exported program.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

Run = Callable[..., Any]
CORE = plif_core(function_spike)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def count_all_nodes(graph: torch.fx.GraphModule) -> int:
    """Returns the number of nodes of a graph, including all nested graphs."""
    return sum(len(module.graph.nodes) for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


def count_nodes(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(str(node.target) == name for node in graph.graph.nodes)


@pytest.mark.long(all_but=["flex_sn_scan-symbolic", "flex_sn_scan_final_state-real"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("scan", [flex_sn_scan, flex_sn_scan_final_state])
def test_make_fx_records_one_node(mode: Literal["real", "fake", "symbolic"], scan: Run) -> None:
    sizes = []
    run = functools.partial(scan, CORE, 1, 1, 1)
    for steps in (3, 1000):
        arguments = CASES[5].arguments(steps, requires_grad=False)
        graph = make_fx(run, tracing_mode=mode)(*arguments)
        assert count_nodes(graph, "flex_sn_scan") == 1
        torch.testing.assert_close(graph(*arguments), run(*arguments), rtol=0, atol=0)
        sizes.append(count_all_nodes(graph))
    assert sizes[0] == sizes[1]


def test_make_fx_records_captured_values_and_gradients() -> None:
    def run(scan: Run) -> Run:
        def gradients(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
            gate = 2 * w
            results = scan(lambda x, v: CORE(x, v, gate), 1, 1, 1, x, v)
            return torch.autograd.grad(sum(r.square().sum() for r in results), [x, v, w])

        return gradients

    sizes = []
    for steps in (3, 1000):
        arguments = CASES[5].arguments(steps)
        graph = make_fx(run(flex_sn_scan))(*arguments)
        assert count_nodes(graph, "flex_sn_scan") == 1
        assert count_nodes(graph, "flex_sn_scan_backward") == 1
        torch.testing.assert_close(graph(*arguments), run(eager_scan)(*arguments))
        sizes.append(count_all_nodes(graph))
    assert sizes[0] == sizes[1]


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flex_sn_scan(lambda x, v: CORE(x, v, self.weight), 1, 1, 1, self.linear(x), v)


@pytest.mark.long(all_but=["False"])
@pytest.mark.parametrize("strict", [True, False])
def test_exported_scan_is_one_node(strict: bool) -> None:
    network = Network()
    v = torch.randn(2, 3)
    sizes = []
    for steps in (3, 1000):
        program = torch.export.export(network, (torch.randn(steps, 2, 3), v), strict=strict)
        assert count_nodes(program.graph_module, "flex_sn_scan") == 1
        sizes.append(count_all_nodes(program.graph_module))
    assert sizes[0] == sizes[1]


@pytest.mark.long(all_but=["False"])
@pytest.mark.parametrize("strict", [True, False])
def test_loaded_program_accepts_every_length(strict: bool) -> None:
    network = Network()
    v = torch.randn(2, 3)
    time = torch.export.Dim("time", min=2, max=4096)
    program = torch.export.export(network, (torch.randn(3, 2, 3), v), strict=strict, dynamic_shapes=({0: time}, None))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for steps in (2, 9, 100):
        x = torch.randn(steps, 2, 3)
        expected = network(x, v)
        torch.testing.assert_close(program.module()(x, v), expected)
        torch.testing.assert_close(loaded.module()(x, v), expected)


@pytest.mark.long  # tests/test_ahead_of_time.py tests it with kernels
def test_program_can_be_compiled_ahead_of_time(tmp_path: Path) -> None:
    network = Network()
    x, v = torch.randn(3, 2, 3), torch.randn(2, 3)
    with torch.no_grad():
        program = torch.export.export(network, (x, v))
        with pytest.warns(UserWarning, match="in processes that have imported flexsn_hop"):
            package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "network.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        torch.testing.assert_close(tuple(compiled(x, v)), network(x, v))
