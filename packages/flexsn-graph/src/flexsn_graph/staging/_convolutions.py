"""Separates biases and gradients from convolutions.

The gradient of the convolved value is also a convolution. The gradient of the weight is a product of two values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from flexsn_graph.ir._ops import SUM_OP
from flexsn_graph.ir._products import CONVOLUTION, convolution_weight

_aten = torch.ops.aten
_prims = torch.ops.prims
_CONVERT: Any = _prims.convert_element_type.default
_HALF = frozenset({torch.float16, torch.bfloat16})
_BACKWARD: Any = _aten.convolution_backward.default


def take_apart(graph: fx.Graph) -> None:
    """Separates biases and gradients from the convolutions of a lowered graph."""
    split_gradients(graph)
    add_biases(graph)


def split_gradients(graph: fx.Graph) -> None:
    """Replaces each result of `aten.convolution_backward` with a separate op."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _BACKWARD:
            for entry in list(node.users):
                assert entry.target is operator.getitem
                with graph.inserting_before(entry):
                    replacement = _GRADIENTS[entry.args[1]](graph, node)
                replacement.meta["val"] = entry.meta["val"]
                replacement.stack_trace = node.stack_trace
                entry.replace_all_uses_with(replacement)
                graph.erase_node(entry)
            graph.erase_node(node)


def add_biases(graph: fx.Graph) -> None:
    """Moves the biases of convolutions into stages if PyTorch adds the biases in a separate pass anyway."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not CONVOLUTION or node.args[2] is None:
            continue
        value, bias = node.meta["val"], node.args[2]
        if not _adds_bias_separately(value):
            continue
        users = list(node.users)
        with graph.inserting_before(node.next):
            spread = _call(graph, _aten.view.default, bias, [-1] + [1] * (value.dim() - 2))
            spread = _call(graph, _aten.expand.default, spread, list(value.shape))
            if value.dtype in _HALF:
                terms = [_call(graph, _CONVERT, term, torch.float32) for term in (node, spread)]
                total = _call(graph, _CONVERT, _call(graph, _prims.add.default, *terms), value.dtype)
            else:
                total = _call(graph, _prims.add.default, node, spread)
        for user in users:
            user.replace_input_with(node, total)
        node.args = (*node.args[:2], None, *node.args[3:])


def _call(graph: fx.Graph, target: Any, first: fx.Node, *rest: Any, **kwargs: Any) -> fx.Node:
    """Creates a node with a fake value and with the stack trace of its first argument."""
    node = graph.call_function(target, (first, *rest), kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    node.meta["val"] = target(*values, **kwargs)
    node.stack_trace = first.stack_trace
    return node


def _adds_bias_separately(value: torch.Tensor) -> bool:
    """True for results of cuDNN, to which PyTorch adds the bias in a separate pass."""
    return value.device.type == "cuda"


def _create_value_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    arguments: Any = node.args
    gradient, value, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    stride, padding, dilation = map(_to_integers, (stride, padding, dilation))
    sizes = _get_shape(weight)
    output_padding = [0] * len(stride)
    if transposed:
        return graph.call_function(
            CONVOLUTION, (gradient, weight, None, stride, padding, dilation, False, output_padding, groups)
        )
    full_padding = [d * (size - 1) - p for d, size, p in zip(dilation, sizes[2:], padding, strict=True)]
    if set(stride) == {1} and min(full_padding) >= 0:  # libraries have faster kernels for the flipped weight
        flipped = _flip(graph, weight, groups)
        return graph.call_function(
            CONVOLUTION, (gradient, flipped, None, stride, full_padding, dilation, False, output_padding, groups)
        )
    output_padding = _count_skipped(_get_shape(value), _get_shape(gradient), sizes, stride, padding, dilation)
    return graph.call_function(
        CONVOLUTION, (gradient, weight, None, stride, padding, dilation, True, output_padding, groups)
    )


def _flip(graph: fx.Graph, weight: fx.Node, groups: int) -> fx.Node:
    """The weight `[in, out / groups, *window]`, with flipped windows, from a weight `[out, in / groups, *window]`."""
    out, inside, *window = _get_shape(weight)
    node = _call(graph, _aten.reshape.default, weight, [groups, out // groups, inside, *window])
    node = _call(graph, _aten.transpose.int, node, 1, 2)
    node = _call(graph, _aten.reshape.default, node, [groups * inside, out // groups, *window])
    node = _call(graph, _aten.flip.default, node, list(range(2, 2 + len(window))))
    return _call(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)


def _create_weight_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient, value, weight, _, *numbers, _ = node.args
    return graph.call_function(convolution_weight, (gradient, value, list(_get_shape(weight)), *numbers))


def _create_bias_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    gradient = node.args[0]
    dims = [d for d in range(len(_get_shape(gradient))) if d != 1]
    return graph.call_function(SUM_OP, (gradient, dims))


_GRADIENTS = (_create_value_gradient, _create_weight_gradient, _create_bias_gradient)


def _get_shape(node: Any) -> Sequence[int]:
    shape: Sequence[int] = node.meta["val"].shape
    return shape


def _to_integers(numbers: Any) -> Sequence[int]:
    return tuple(numbers)


def _count_skipped(
    value: Sequence[int],
    result: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The numbers of rows and columns at the end of a value that a convolution with strides does not read."""
    return [
        value[2 + d] - ((result[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + 1)
        for d in range(len(stride))
    ]
