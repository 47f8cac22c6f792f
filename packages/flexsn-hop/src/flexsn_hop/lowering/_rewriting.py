"""Rewrites nodes in a copy of a graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

__all__ = ["rewrite_nodes"]


def rewrite_nodes(
    module: fx.GraphModule, is_affected: Callable[[fx.Node], bool], rewrite: Callable[[fx.Graph, fx.Node], None]
) -> fx.GraphModule:
    """Returns a copy of a graph in which each affected node is rewritten, without nodes that then have no users.

    Args:
        is_affected: function that returns True for each node that `rewrite` receives.
        rewrite: function that receives the copy of the graph and a node of the copy. The function may replace the uses
            of the node.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if is_affected(node):
            rewrite(graph, node)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
