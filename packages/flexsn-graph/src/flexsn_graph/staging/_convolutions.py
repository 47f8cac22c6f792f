"""Separates biases and gradients from convolutions.

The gradient of a convolution's value is also a convolution. The gradient of the weight is a product of two values.
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
                    made = _GRADIENTS[entry.args[1]](graph, node)
                made.meta["val"] = entry.meta["val"]
                made.stack_trace = node.stack_trace
                entry.replace_all_uses_with(made)
                graph.erase_node(entry)
            graph.erase_node(node)


def add_biases(graph: fx.Graph) -> None:
    """Moves the biases of convolutions into stages if the convolution's library adds them in a separate pass anyway."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not CONVOLUTION or node.args[2] is None:
            continue
        value, bias = node.meta["val"], node.args[2]
        if not _is_added_apart(value):
            continue
        users = list(node.users)
        with graph.inserting_before(node.next):
            spread = _called(graph, _aten.view.default, bias, [-1] + [1] * (value.dim() - 2))
            spread = _called(graph, _aten.expand.default, spread, list(value.shape))
            if value.dtype in _HALF:
                terms = [_called(graph, _CONVERT, term, torch.float32) for term in (node, spread)]
                total = _called(graph, _CONVERT, _called(graph, _prims.add.default, *terms), value.dtype)
            else:
                total = _called(graph, _prims.add.default, node, spread)
        for user in users:
            user.replace_input_with(node, total)
        node.args = (*node.args[:2], None, *node.args[3:])


def _called(graph: fx.Graph, target: Any, first: fx.Node, *rest: Any, **kwargs: Any) -> fx.Node:
    """Creates a node with a fake value and with the stack trace of its first argument."""
    node = graph.call_function(target, (first, *rest), kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    node.meta["val"] = target(*values, **kwargs)
    node.stack_trace = first.stack_trace
    return node


def _is_added_apart(value: torch.Tensor) -> bool:
    """True for results of cuDNN, to which PyTorch adds the bias in a separate pass."""
    return value.device.type == "cuda"


def _of_value(graph: fx.Graph, node: fx.Node) -> fx.Node:
    arguments: Any = node.args
    gradient, value, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    stride, padding, dilation = map(_integers, (stride, padding, dilation))
    sizes = _shape(weight)
    added = [0] * len(stride)
    if transposed:
        return graph.call_function(
            CONVOLUTION, (gradient, weight, None, stride, padding, dilation, False, added, groups)
        )
    around = [d * (size - 1) - p for d, size, p in zip(dilation, sizes[2:], padding, strict=True)]
    if set(stride) == {1} and min(around) >= 0:  # flip the weight, because libraries have faster kernels for this
        turned = _turned(graph, weight, groups)
        return graph.call_function(
            CONVOLUTION, (gradient, turned, None, stride, around, dilation, False, added, groups)
        )
    added = _missing(_shape(value), _shape(gradient), sizes, stride, padding, dilation)
    return graph.call_function(CONVOLUTION, (gradient, weight, None, stride, padding, dilation, True, added, groups))


def _turned(graph: fx.Graph, weight: fx.Node, groups: int) -> fx.Node:
    """The weight `[out, in / groups, *window]` of a convolution from `out` to `in`, with flipped windows."""
    out, inside, *window = _shape(weight)
    node = _called(graph, _aten.reshape.default, weight, [groups, out // groups, inside, *window])
    node = _called(graph, _aten.transpose.int, node, 1, 2)
    node = _called(graph, _aten.reshape.default, node, [groups * inside, out // groups, *window])
    node = _called(graph, _aten.flip.default, node, list(range(2, 2 + len(window))))
    return _called(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)


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
    """The numbers of rows and columns at the end of a value that a convolution with strides does not read."""
    return [
        value[2 + d] - ((result[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + 1)
        for d in range(len(stride))
    ]
