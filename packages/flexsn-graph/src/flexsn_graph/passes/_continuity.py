"""Values of a step that may be rounded a little differently without a jump in a result.

Gradients are compared with eager mode up to rounding. But a value that is compared with a threshold decides about a
spike, and has to equal the forward's value. So a division may be a fast one only if its result reaches no comparison.
"""

from __future__ import annotations

from torch import Tensor, fx

from flexsn_graph.ir._ops import facts_of


def continuous_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose value reaches the results through continuous ops on floating-point values alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if all(user.op == "output" or (user in found and _keeps(user, node)) for user in node.users):
            found.add(node)
    return frozenset(found)


def _keeps(user: fx.Node, node: fx.Node) -> bool:
    value, facts = user.meta.get("val"), facts_of(user.target)
    if facts is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return all(i in facts.continuous for i, argument in enumerate(user.args) if argument is node)
