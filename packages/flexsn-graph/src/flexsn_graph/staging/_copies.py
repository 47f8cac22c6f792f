"""Removes copies and aliases from the graph of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph.ir._products import COPY_OP, call_of, replay
from flexsn_graph.staging._views import is_view

_aten = torch.ops.aten
_prims = torch.ops.prims
_SAME = frozenset({_aten.detach.default, _aten.alias.default, _prims.view_of.default})


def drop_copies(graph: fx.Graph) -> None:
    """Replaces copies and aliases with their sources, because a functional graph never writes to a value.

    A copy remains if strides can express a view of the copy, but not the same view of its source.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
    needed: set[fx.Node] = set()
    while True:
        copy = _find_needed_copy(graph, needed)
        if copy is None:
            break
        needed.add(copy)
    for node in graph.nodes:
        if node.target is COPY_OP and node not in needed:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _find_needed_copy(graph: fx.Graph, needed: set[fx.Node]) -> fx.Node | None:
    """A copy that is not in `needed` and has to remain because a view needs it. `None` if there is no such copy."""
    stand_ins: dict[fx.Node, Any] = {}
    copy_of: dict[fx.Node, fx.Node | None] = {}  # maps a value to the copy of which it is a view
    for node in graph.nodes:
        source = node.all_input_nodes[0] if is_view(node) or node.target is COPY_OP else None
        if source is None or node in needed:
            value = node.meta.get("val")
            stand_ins[node] = torch.empty(value.shape, device="meta") if isinstance(value, Tensor) else None
            copy_of[node] = None
        elif node.target is COPY_OP:
            stand_ins[node], copy_of[node] = stand_ins[source], node
        else:
            copy_of[node] = copy_of[source]
            try:
                stand_ins[node] = replay([call_of(node)], stand_ins[source])
            except RuntimeError:
                if copy_of[node] is None:
                    raise
                return copy_of[node]
    return None
