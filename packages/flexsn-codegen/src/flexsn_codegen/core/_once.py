"""Selects values that are equal in all steps and worth computing before the loop over time.

Only targets whose compilers do not move such computations out of the loop need this selection.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from flexsn_graph import ELEMENT_WORD, Role, StepGraph, facts_of

_prims = torch.ops.prims

# Computing these ops takes as long as loading their results. Exact ops (`OpFacts.exact`), such as selections and
# negations, are equally fast.
_QUICK = frozenset(getattr(_prims, name).default for name in ("add", "convert_element_type", "mul", "sub"))


def computed_once(step: StepGraph) -> tuple[fx.Node, ...]:
    """The nodes of slow ops, such as functions and divisions, that only depend on lifted tensors.

    A node that is only needed to compute other such nodes is not included. The values of the nodes are floating-point
    numbers, except for the integers from which an element's random numbers are computed.
    """
    constant = {node for port, node in step.placeholders.items() if port.role is Role.LIFTED}
    for node in step.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    slow = {node for node in constant if node.op == "call_function" and is_slow(node)}
    if not slow:
        return ()
    needed = needed_for(step, slow)
    return tuple(node for node in step.graph.nodes if node in slow and node in needed)


def needed_for(step: StepGraph, boundary: set[fx.Node]) -> set[fx.Node]:
    """The nodes from which a step's results are computed. Nodes in `boundary` are included, and end the search."""
    results: set[fx.Node] = set()
    pending = [entry for entry in step.entries if isinstance(entry, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in results:
            results.add(node)
            pending += [] if node in boundary else node.all_input_nodes
    return results


def is_slow(node: fx.Node) -> bool:
    """True if loading a node's value is faster than computing it from its operands."""
    if node.target is ELEMENT_WORD:
        return True
    facts, value = facts_of(node.target), node.meta.get("val")
    if facts is None or facts.exact or node.target in _QUICK:
        return False
    return isinstance(value, Tensor) and value.dtype.is_floating_point
