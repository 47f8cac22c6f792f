"""The normal form of graphs: prims of constants and nodes, without aliases, duplicates and unused nodes."""

from __future__ import annotations

import sys

import pytest
import torch
from graph_cores import CASES, Case, lif_core
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn_graph import trace_step
from flexsn_graph.lowering._decompositions import MISSING_IN_TORCH

prims = torch.ops.prims
ALIASES = {"broadcast_in_dim", "clone", "squeeze", "reshape", "transpose", "view_of", "sum", "collapse_view"}


def list_calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def find_op(node: fx.Node) -> torch._ops.OpOverload:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def list_names(graph: fx.Graph) -> list[str]:
    return [find_op(node)._opname for node in list_calls(graph)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graphs_have_the_normal_form(case: Case) -> None:
    trace = trace_step(case.core, *case.counts, case.arguments())
    vjp = trace.vjp([True] * len(trace.differentiable), [True] * (case.num_inputs + case.num_states))
    for graph in (trace.forward.graph, vjp.graph):
        graph.lint()
        keys = []
        for node in list_calls(graph):
            assert find_op(node).namespace == "prims"
            assert find_op(node)._opname not in ALIASES
            assert node.users, f"{node} is not used"
            assert isinstance(node.meta["val"], Tensor)
            keys.append((node.target, node.args, str(node.kwargs), node.meta["val"].dtype))
        assert len({str(key) for key in keys}) == len(keys), "an op is there twice"


def test_lif_has_as_few_ops_as_by_hand() -> None:
    """Expects `sub div add sub ge convert` up to the spike, and `sub mul` for the reset."""
    trace = trace_step(lif_core(), 1, 1, 1, (torch.zeros(3), torch.zeros(3)))
    expected = "sub div add sub ge convert_element_type sub mul"
    assert list_names(trace.forward.graph) == expected.split()


def test_unused_values_are_not_computed() -> None:
    trace = trace_step(lambda x, v: (x + 1.0, torch.exp(v) * 0.0 + v, v)[::2], 1, 1, 1, CASES[0].arguments())
    assert [n.target for n in list_calls(trace.forward.graph)] == [prims.add.default]


def test_equal_expressions_are_one_node() -> None:
    trace = trace_step(lambda x: (x * 2.0 + 1.0) * (x * 2.0 + 1.0), 1, 0, 1, (torch.zeros(3),))
    assert list_names(trace.forward.graph) == ["mul", "add", "mul"]


def test_zeros_of_both_signs_are_two_constants() -> None:
    trace = trace_step(lambda x: (x * 0.0, x * -0.0), 1, 0, 2, (torch.zeros(3),))
    assert len(list_calls(trace.forward.graph)) == 2


def test_nodes_cite_the_users_line() -> None:
    def core(x: Tensor) -> Tensor:
        y = x * 3.0
        return y.sigmoid()

    trace = trace_step(core, 1, 0, 1, (torch.zeros(3),))
    first = core.__code__.co_firstlineno
    traces = [n.stack_trace or "" for n in list_calls(trace.forward.graph)]
    assert f'{__file__}", line {first + 1}, in core\n    y = x * 3.0' in traces[0]
    assert all(f'{__file__}", line {first + 2}, in core' in text for text in traces[1:])
    # An op of the backward formula has the line of the op whose gradient it computes.
    vjp = trace.vjp([True], [True])
    assert all(f'{__file__}", line {first + 1}' in (n.stack_trace or "") for n in list_calls(vjp.graph)[-1:])


def test_placeholders_are_named_by_their_roles() -> None:
    w = torch.zeros(3)
    trace = trace_step(lambda x, y, v: (x + w, y, v), 2, 1, 2, (torch.zeros(3),) * 3)
    placeholders = [n.name for n in trace.forward.graph.nodes if n.op == "placeholder"]
    assert placeholders == ["input_0", "input_1", "state_0", "lifted_0"]


def test_growth_is_close_to_linear() -> None:
    """Counts calls of Python functions, because this count is equal in every run, unlike the time."""

    def count_python_calls(repeats: int) -> int:
        def step(x: Tensor) -> Tensor:
            for _ in range(repeats):
                x = x * 0.5 + torch.sin(x)
            return x

        calls_seen = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal calls_seen
            calls_seen += event == "call"

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            trace = trace_step(step, 1, 0, 1, (torch.zeros(3),))
            vjp = trace.vjp([True], [True])
        finally:
            sys.setprofile(before)
        assert len(list_calls(trace.forward.graph)) == 3 * repeats
        assert len(list_calls(vjp.graph)) > 3 * repeats
        return calls_seen

    count_python_calls(5)  # fills torch's own caches
    assert count_python_calls(40) < 8 * 1.2 * count_python_calls(5)


def test_copy_of_a_broadcast_value_is_contiguous() -> None:
    """Tests a view of the copy. The strides of the broadcast value allow no such view."""

    def viewed(target: Tensor, value: Tensor) -> Tensor:
        copied: Tensor = torch.ops.aten.copy(target, value)
        return copied.view(-1)

    target, value = torch.zeros(3, 2), torch.rand(2)
    graph = make_fx(viewed, decomposition_table=MISSING_IN_TORCH)(target, value)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)
    assert torch.equal(graph(target, value), value.repeat(3))
