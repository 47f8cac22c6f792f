"""Rewrites nodes in a copy of a graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

__all__ = ["rewrite_nodes"]


def rewrite_nodes(
    module: fx.GraphModule, is_affected: Callable[[fx.Node], bool], rewrite: Callable[[fx.Graph, fx.Node], None]
) -> fx.GraphModule:
    """Returns a copy of a graph in which each affected node is rewritten. Nodes without users are then removed.

    Args:
        is_affected: returns True for a node that `rewrite` is called for.
        rewrite: receives the copy and the node, and may replace the uses of the node.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if is_affected(node):
            rewrite(graph, node)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
