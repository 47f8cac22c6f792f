"""Finds the values of a step for which a small rounding error cannot cause a jump in a result.

Gradients equal those of eager mode up to rounding. However, a value that is compared with a threshold decides whether a
spike occurs, so it has to equal the value in the forward exactly. Therefore, a division may use fast arithmetic only if
its result reaches no comparison.
"""

from __future__ import annotations

from torch import Tensor, fx

from flexsn_graph.ir._ops import facts_of


def continuous_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose values reach the results only through continuous ops on floating-point values."""
    results: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if all(user.op == "output" or (user in results and _is_continuous(user, node)) for user in node.users):
            results.add(node)
    return frozenset(results)


def _is_continuous(user: fx.Node, node: fx.Node) -> bool:
    value, facts = user.meta.get("val"), facts_of(user.target)
    if facts is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return all(i in facts.continuous for i, argument in enumerate(user.args) if argument is node)
