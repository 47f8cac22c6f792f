"""Functions for nodes that are views of other nodes, and for the pieces of assembled values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph.ir._ops import ALIAS_OPS, SUM_OP
from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._products import CAT_OP, COPY_OP, SELECT_BACKWARD_OP, Call, call_of, replay
from flexsn_graph.lowering._strides import broadcast_shapes
from flexsn_graph.staging._staged_step import View

_aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """True for a view, and for an entry of a tuple of views."""
    target: Any = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return bool(node.op == "call_function" and target in ALIAS_OPS and target is not COPY_OP)


def narrows(node: fx.Node) -> bool:
    """True if a view drops elements. An entry of a tuple of views always drops elements."""
    if not is_view(node):
        return False
    if node.target is operator.getitem:
        return True
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return isinstance(value, Tensor) and isinstance(source, Tensor) and value.numel() < source.numel()


def realigns(node: fx.Node) -> bool:
    """True if a view adds or drops dimensions so that its elements move to other rows and columns of a step."""
    if not is_view(node):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if not isinstance(value, Tensor) or value.dim() == source.dim() or source.numel() == 1:
        return False
    if value.dim() < source.dim():
        return bool(tuple(source.shape) != (1,) * (source.dim() - value.dim()) + tuple(value.shape))
    before = torch.empty(source.shape, device="meta")
    if broadcast_shapes([tuple(source.shape), tuple(value.shape)]) != tuple(value.shape):
        return True
    replayed: Tensor = replay([call_of(node)], before)
    expanded = before.expand(value.shape)
    pairs = zip(value.shape, replayed.stride(), expanded.stride(), strict=True)
    return any(size > 1 and stride != expanded_stride for size, stride, expanded_stride in pairs)


def differs(argument: Any, node: fx.Node) -> bool:
    """True if an argument of an op is a number, or if its shape differs from the shape of the result."""
    return not isinstance(argument, fx.Node) or argument.meta["val"].shape != node.meta["val"].shape


def reaches(node: fx.Node, shape: tuple[int, ...]) -> bool:
    return broadcast_shapes([tuple(node.meta["val"].shape), shape]) == shape


def whole_view(port: Port, node: fx.Node) -> View:
    value = node.meta["val"]
    shape = unsummed_shape(node) if port.role is Role.GRAD_INPUT else tuple(value.shape)
    return View(port, (), shape, value.dtype)


def unsummed_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a gradient before the sums that reduce it to the shape of its argument."""
    shape = tuple(node.meta["val"].shape)
    while is_view(node) or node.target is SUM_OP:
        if node.target is SUM_OP:
            shape = tuple(node.all_input_nodes[0].meta["val"].shape)
        node = node.all_input_nodes[0]
    return shape


def before_sums(node: fx.Node) -> fx.Node:
    """The value from which only sums and views lead to a node."""
    while is_view(node) or node.target is SUM_OP:
        node = node.all_input_nodes[0]
    return node


def pieces_of(node: fx.Node, whole: View) -> list[tuple[Any, View]]:
    """The pieces of an assembled value, each with its position in the value."""
    target: Any = node.target
    args: Any = node.args
    if target is CAT_OP:
        dim = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
        start, pieces = 0, []
        for piece in args[0]:
            value = piece.meta["val"]
            end = start + value.shape[dim]
            call: Call = (_aten.slice.Tensor, (dim, start, end), {})
            pieces.append((piece, View(whole.source, (call,), tuple(value.shape), value.dtype)))
            start = end
        return pieces
    if target is COPY_OP:
        return [(args[0], whole)]
    value = args[0].meta["val"]
    if target is SELECT_BACKWARD_OP:
        call = (_aten.select.int, tuple(args[2:4]), {})
    else:
        call = (_aten.slice.Tensor, tuple(args[2:]), {})
    return [(args[0], View(whole.source, (call,), tuple(value.shape), value.dtype))]
