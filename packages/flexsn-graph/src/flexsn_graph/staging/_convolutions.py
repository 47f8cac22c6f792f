"""Gradients of convolutions, apart: of a value a convolution again, of a weight a product of two values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from flexsn_graph.ir._ops import SUM_OP
from flexsn_graph.ir._products import CONVOLUTION, convolution_weight

_BACKWARD: Any = torch.ops.aten.convolution_backward.default


def split_gradients(graph: fx.Graph) -> None:
    """Replaces each result of `aten.convolution_backward` by an op of its own."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _BACKWARD:
            for entry in list(node.users):
                assert entry.target is operator.getitem
                with graph.inserting_before(entry):
                    made = _GRADIENTS[entry.args[1]](graph, node)
                made.meta["val"] = entry.meta["val"]
                made.stack_trace = node.stack_trace
                entry.replace_all_uses_with(made)
                graph.erase_node(entry)
            graph.erase_node(node)


def _of_value(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient, value, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    added = [0] * len(_integers(stride))
    if not transposed:
        added = _missing(_shape(value), _shape(gradient), _shape(weight), *map(_integers, (stride, padding, dilation)))
    numbers = (stride, padding, dilation, not transposed, added, groups)
    return graph.call_function(CONVOLUTION, (gradient, weight, None, *numbers))


def _of_weight(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient, value, weight, _, *numbers, _ = node.args
    return graph.call_function(convolution_weight, (gradient, value, list(_shape(weight)), *numbers))


def _of_bias(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient = node.args[0]
    dims = [d for d in range(len(_shape(gradient))) if d != 1]
    return graph.call_function(SUM_OP, (gradient, dims))


_GRADIENTS = (_of_value, _of_weight, _of_bias)


def _shape(node: Any) -> Sequence[int]:
    shape: Sequence[int] = node.meta["val"].shape
    return shape


def _integers(numbers: Any) -> Sequence[int]:
    return tuple(numbers)


def _missing(
    value: Sequence[int],
    result: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Rows and columns at the end of a value that a convolution with strides leaves out."""
    return [
        value[2 + d] - ((result[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + 1)
        for d in range(len(stride))
    ]
