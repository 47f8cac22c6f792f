"""`extract_info` names the value in each result of a kernel."""

from __future__ import annotations

import pytest
import torch
from graph_cores import lif_core
from torch import Tensor, fx

from flexsn_graph import (
    FlexSNInfo,
    GraphArityError,
    extract_info,
    generate_forward_and_backward_graph,
    generate_inference_graph,
)

X = torch.zeros(3)


def test_fields_have_a_fixed_order() -> None:
    assert FlexSNInfo._fields == (
        "num_inputs",
        "num_outputs",
        "num_states",
        "fwd_core_args",
        "fwd_core_returns",
        "fwd_core_recipients",
        "fwd_kernel_returns",
        "num_fwd_kernel_returns",
        "c2k_return_mapping",
    )


def test_inference_graph_has_its_names_in_order() -> None:
    graph = generate_inference_graph(lambda x, v: (x + v, v * 0.5), (X, X))
    info = extract_info(graph, num_inputs=1, num_states=1, num_outputs=1)
    assert info == FlexSNInfo(
        num_inputs=1,
        num_outputs=1,
        num_states=1,
        fwd_core_args=("input_0", "input_1"),
        fwd_core_returns=("add", "mul"),
        fwd_core_recipients=("add", "mul"),
        fwd_kernel_returns=("add", "mul"),
        num_fwd_kernel_returns=2,
        c2k_return_mapping=(),
    )


def test_result_that_is_returned_twice_is_stored_once() -> None:
    def core(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x + v
        return h, h, v

    info = extract_info(generate_inference_graph(core, (X, X)), 1, 1, 2)
    assert info.fwd_core_returns == ("add", "add", "input_1")
    assert info.fwd_core_recipients == ("add", "_", "input_1")
    assert info.fwd_kernel_returns == ("add", "input_1")
    assert info.num_fwd_kernel_returns == 2


def test_repeated_intermediates_and_results_are_stored_once() -> None:
    graph = fx.Graph()
    x, v = graph.placeholder("x"), graph.placeholder("v")
    h = graph.call_function(torch.ops.prims.add.default, (x, v), name="h")
    s = graph.call_function(torch.ops.prims.exp.default, (h,), name="s")
    graph.output((s, h, x, h, v, x))
    info = extract_info(graph, 1, 1, 1)
    assert info.fwd_core_recipients == ("s", "h", "x", "_", "v", "_")
    assert info.fwd_kernel_returns == ("s", "h", "x", "v")
    assert info.c2k_return_mapping == (2, 1, 3, 2)


def test_training_graph_is_consistent() -> None:
    forward, backward = generate_forward_and_backward_graph(lif_core(), (X, X))
    info = extract_info(forward, 1, 1, 1)
    saved = [n for n in backward.nodes if n.op == "placeholder" and n.name.startswith("saved")]
    assert len(info.c2k_return_mapping) == len(saved)
    for intermediate, position in zip(info.fwd_core_returns[2:], info.c2k_return_mapping, strict=True):
        assert info.fwd_kernel_returns[position] == intermediate
    assert [r for r in info.fwd_core_recipients if r != "_"] == list(info.fwd_kernel_returns)


def test_single_result_needs_no_tuple() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    assert extract_info(graph).fwd_kernel_returns == ("x",)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 1, 1), r"takes 2 arguments; num_inputs \+ num_states is 2 \+ 1 = 3"),
        ((1, 1, 2), r"returns 2 values; num_outputs \+ num_states is 2 \+ 1 = 3"),
    ],
)
def test_wrong_counts_are_refused(counts: tuple[int, int, int], message: str) -> None:
    graph = generate_inference_graph(lif_core(), (X, X))
    with pytest.raises(GraphArityError, match=message) as caught:
        extract_info(graph, *counts)
    assert isinstance(caught.value, ValueError)


def test_constant_result_is_refused() -> None:
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((1.0,))
    with pytest.raises(GraphArityError, match=r"returns 1\.0"):
        extract_info(graph)
