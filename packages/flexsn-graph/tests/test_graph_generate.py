"""Graphs of pointwise functions, for inference, and for a forward with its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_cores import CASES, PLIF, Case, lif_core
from graph_eval import assert_same, eager_vjp, evaluate, read_lifted, sum_lifted
from torch import Tensor, fx

from flexsn_graph import (
    LiftedLayout,
    NonPointwiseError,
    extract_info,
    generate_forward_and_backward_graph,
    generate_inference_graph,
)


def list_placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def list_captured_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in list_placeholders(graph) if "captured" in n.meta]


def run(graph: fx.Graph, examples: Sequence[Tensor], shape: Sequence[int]) -> list[Any]:
    lifted = [read_lifted(n.meta["captured"], n.meta["layout"], shape) for n in list_captured_nodes(graph)]
    return evaluate(graph, [*examples, *lifted], shape)


def check_pair(
    function: Callable[..., Any], examples: Sequence[Tensor], shape: Sequence[int], rtol: float = 0.0
) -> tuple[fx.Graph, fx.Graph]:
    """Compares the forward, and the backward on the saved values of the forward, with eager autograd."""
    forward, backward = generate_forward_and_backward_graph(function, tuple(examples))
    expected = function(*examples)
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    actual = run(forward, examples, shape)
    results, saved = actual[: len(expected)], actual[len(expected) :]
    for ours, theirs in zip(results, expected, strict=True):
        assert_same(ours, theirs.detach().expand(tuple(shape)), rtol)
    torch.manual_seed(1)
    differentiable = [f"grad_result_{i}" in map(str, list_placeholders(backward)) for i in range(len(expected))]
    weights = [
        torch.randn(r.shape, dtype=r.dtype) if is_present else None
        for r, is_present in zip(expected, differentiable, strict=True)
    ]
    captured = [n.meta["captured"] for n in list_captured_nodes(forward)]
    layouts = [n.meta["layout"] for n in list_captured_nodes(forward)]
    reference = eager_vjp(function, examples, captured, weights)
    gradients = evaluate(backward, [*saved, *(w for w in weights if w is not None)], shape)
    assert len(gradients) == len(reference)
    for i, (ours, theirs) in enumerate(zip(gradients, reference, strict=True)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            if i < len(examples):
                summed = ours.sum_to_size(examples[i].shape)
            else:
                summed = sum_lifted(ours, captured[i - len(examples)], layouts[i - len(examples)])
            torch.testing.assert_close(summed, theirs, rtol=1e-12, atol=1e-12)
    return forward, backward


@pytest.mark.long(all_but=["izhikevich", "lif_hard_detached"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_and_backward_equal_autograd(case: Case) -> None:
    forward, _ = check_pair(case.core, case.arguments(), (3, 5))
    info = extract_info(forward, case.num_inputs, case.num_states, case.num_outputs)
    assert info.num_fwd_kernel_returns <= len(info.fwd_core_returns)


def test_captured_tensors_have_autograds_gradients() -> None:
    torch.manual_seed(0)
    core = PLIF(torch.randn(3, dtype=torch.float64), lambda w: w[:, None])
    x, v = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    forward, _ = check_pair(core, (x, v), (2, 3, 4), rtol=1e-15)
    (node,) = list_captured_nodes(forward)
    assert node.meta["captured"] is core.w
    assert node.meta["layout"] == LiftedLayout((0, 1, 0), 0)


def test_inputs_broadcast() -> None:
    """Tests a gated activation with a bias per channel, which is a pointwise kernel without a scan."""

    def function(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        return (x + bias) * torch.sigmoid(gate)

    torch.manual_seed(0)
    x, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    gate = torch.randn(6, 1, dtype=torch.float64)
    graph = generate_inference_graph(function, (x, gate, bias))
    assert_same(run(graph, (x, gate, bias), (6, 4))[0], function(x, gate, bias), rtol=1e-15)
    check_pair(function, (x, gate, bias), (6, 4), rtol=1e-15)


def test_results_may_have_different_shapes() -> None:
    x, b = torch.randn(3, 4), torch.randn(4)
    graph = generate_inference_graph(lambda x, b: (x * b, b * 2.0), (x, b))
    for ours, theirs in zip(run(graph, (x, b), (3, 4)), (x * b, (b * 2.0).expand(3, 4)), strict=True):
        assert_same(ours, theirs)


def test_gradient_that_would_be_counted_several_times_is_refused() -> None:
    """Checks that the gradient of a small result is not added once for each element that reads the result."""
    x, b, c = torch.zeros(3, 4), torch.zeros(4), torch.zeros(4)
    with pytest.raises(NonPointwiseError, match="reduces a gradient"):
        generate_forward_and_backward_graph(lambda x, b: (x * b, b * 2.0), (x, b))
    with pytest.raises(NonPointwiseError, match="not a sum over the elements that share it"):
        generate_forward_and_backward_graph(lambda x, b, c: (x * b, c * 2.0), (x, b, c))


def test_results_that_are_not_differentiable_have_no_gradient_argument() -> None:
    x = torch.randn(5, dtype=torch.float64)
    _, backward = check_pair(lambda x: (x > 0, x * x, x.floor().int()), (x,), (5,))
    assert [n.name for n in list_placeholders(backward)] == ["saved_0", "grad_result_1"]


def test_requires_grad_selects_the_gradients() -> None:
    x, v = torch.zeros(2, 3, dtype=torch.float64)
    for mask in ((True, False), (False, True), (True, True)):
        _, backward = generate_forward_and_backward_graph(lif_core(), (x, v), mask)
        output = next(n for n in backward.nodes if n.op == "output")
        assert tuple(entry is not None for entry in output.args[0]) == mask
    _, backward = generate_forward_and_backward_graph(lambda x, n: x * n, (x, torch.arange(3)))
    output = next(n for n in backward.nodes if n.op == "output")
    assert [entry is not None for entry in output.args[0]] == [True, False]


def test_minimum_cut_saves_few_values() -> None:
    """Checks that LIF saves at most its two arguments and the spike, but no membrane or surrogate values."""
    x, v = torch.zeros(2, 100)
    forward, _ = generate_forward_and_backward_graph(lif_core(), (x, v))
    output = next(n for n in forward.nodes if n.op == "output")
    assert len(set(output.args[0][2:]) - set(output.args[0][:2])) <= 2


def test_inference_has_only_the_forward() -> None:
    graph = generate_inference_graph(lif_core(), (torch.zeros(3), torch.zeros(3)))
    assert [n.name for n in list_placeholders(graph)] == ["input_0", "input_1"]
    results = run(graph, (torch.ones(3) * 4, torch.zeros(3)), (3,))
    assert_same(results[0], torch.ones(3))
