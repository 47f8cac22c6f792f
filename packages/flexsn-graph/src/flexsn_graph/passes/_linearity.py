"""Linearity of a step's results in some of its arguments."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx

from flexsn_graph.ir._ops import facts_of, is_zero
from flexsn_graph.ir._ports import Role
from flexsn_graph.ir._step_graph import StepGraph


def is_linear(step: StepGraph, roles: Collection[Role]) -> bool:
    """True if all results are linear in the arguments of these roles together, up to rounding.

    A backward formula is linear in its cotangents, unless a user's own does something else with them, such as clipping.

    Args:
        step: forward, or a VJP.
        roles: of the arguments; the others count as fixed.
    """
    nodes = step.placeholders
    dependent = {node for port, node in nodes.items() if port.role in roles}
    for node in step.graph.nodes:
        if node.op == "call_function" and not dependent.isdisjoint(node.all_input_nodes):
            if not _keeps_linearity(node, dependent):
                return False
            dependent.add(node)
    return all(entry in dependent or _vanishes(entry) for entry in step.entries)


def _keeps_linearity(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    value, facts = node.meta.get("val"), facts_of(node.target)
    if facts is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    places = {i for i, argument in enumerate(node.args) if argument in dependent}
    if len(places) < sum(argument in dependent for argument in node.all_input_nodes):
        return False  # given by keyword
    return any(
        places <= together and all(_vanishes(node.args[i]) for i in together - places) for together in facts.linear
    )


def _vanishes(value: object) -> bool:
    return is_zero(value) if isinstance(value, fx.Node) else isinstance(value, int | float) and value == 0
