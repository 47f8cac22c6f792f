"""Rewrites assignments by a mask as conditions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexsn_hop.lowering._rewriting import rewrite_nodes

__all__ = ["masks_as_conditions"]

_aten = torch.ops.aten


def masks_as_conditions(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrites `v[mask] = number` as `where(mask, number, v)`.

    If an assignment by an index tensor precedes such an assignment in a compiled step, the code of Inductor in torch
    2.11 and 2.13 reads the mask from memory that the earlier assignment has already changed. Returns `module` itself if
    `module` contains no assignment by a mask.

    Args:
        module: a graph of ATen operations, with examples of their results in `meta["val"]`.
    """
    if not any(_assigns_by_mask(node) for node in module.graph.nodes):
        return module
    return rewrite_nodes(module, _assigns_by_mask, _rewrite)


def _assigns_by_mask(node: fx.Node) -> bool:
    if node.target is not _aten.index_put.default:
        return False
    values, indices, number = _split_operands(node)
    return (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].meta["val"].dtype == torch.bool
        and number.meta["val"].dim() <= values.meta["val"].dim()
        and all(str(size) == "1" for size in number.meta["val"].shape)  # comparing text adds no guard
    )


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    values, (mask,), number = _split_operands(node)
    accumulates = (*node.args[3:], *node.kwargs.values(), False)[0]
    with graph.inserting_before(node):
        while mask.meta["val"].dim() < values.meta["val"].dim():
            mask = _add_call(graph, _aten.unsqueeze.default, mask, -1)
        if accumulates:
            number = _add_call(graph, _aten.add.Tensor, values, number)
        new = graph.call_function(_aten.where.self, (mask, number, values))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _add_call(graph: fx.Graph, operator: Any, *args: Any) -> fx.Node:
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _split_operands(node: fx.Node) -> Any:
    """Returns the tensor, the list of indices, and the assigned values of an assignment."""
    return node.args[:3]
