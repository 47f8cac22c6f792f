"""Detects results of a step that are linear in some of its arguments, and extracts the linear part of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph.ir._ops import facts_of, is_zero
from flexsn_graph.ir._ports import Role
from flexsn_graph.ir._step_graph import StepGraph

_prims = torch.ops.prims


def is_linear(step: StepGraph, roles: Collection[Role]) -> bool:
    """True if all results are jointly linear in the arguments that have these roles, up to rounding.

    A backward formula is linear in its cotangents, unless a user's own formula applies a nonlinear operation to them,
    such as clipping.

    Args:
        step: a forward graph or a VJP.
        roles: roles of the arguments. All other arguments are fixed.
    """
    nodes = step.placeholders
    dependent = {node for port, node in nodes.items() if port.role in roles}
    for node in step.graph.nodes:
        if node.op == "call_function" and not dependent.isdisjoint(node.all_input_nodes):
            if not _keeps_linearity(node, dependent, affine=False):
                return False
            dependent.add(node)
    return all(entry in dependent or _vanishes(entry) for entry in step.entries)


def linear_part(step: StepGraph) -> StepGraph | None:
    """The new states of a step as a linear function of the states before the step, without the addends.

    Returns:
        `[inputs, states, lifted] -> [*new_states]`, with the new states that depend on states. `None` if these new
        states are not affine functions of the states. The result is derived from the step's own operations and not
        from its VJP, because a surrogate makes the VJP the gradient of another function.
    """
    nodes = step.placeholders
    dependent = {node for port, node in nodes.items() if port.role is Role.STATE}
    new_states = {
        port: entry for port, entry in zip(step.results, step.entries, strict=True) if port.role is Role.STATE
    }
    needed = ancestors(entry for entry in new_states.values() if isinstance(entry, fx.Node))
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.graph.nodes:
        if node.op == "placeholder":
            new[node] = graph.node_copy(node)
        elif node.op == "call_function" and node in needed:
            if dependent.isdisjoint(node.all_input_nodes):
                new[node] = graph.node_copy(node, new.__getitem__)
            elif not _keeps_linearity(node, dependent, affine=True):
                return None
            else:
                new[node] = _drop_addend(graph, node, new, dependent)
                dependent.add(node)
    results = {port: new[entry] for port, entry in new_states.items() if entry in dependent}
    graph.output(tuple(results.values()))
    graph.eliminate_dead_code()
    return StepGraph(graph, step.arguments, tuple(results), step.layouts)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes themselves, and all nodes on which they depend."""
    results: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in results:
            results.add(node)
            waiting += node.all_input_nodes
    return results


def _drop_addend(
    graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node], dependent: Collection[fx.Node]
) -> fx.Node:
    """An affine operation on dependent values, with its addends replaced by zeros."""
    target: Any = node.target
    free = [argument not in dependent for argument in node.args]
    if target in (_prims.add.default, _prims.sub.default) and any(free):
        (dependent_operand,) = [new[a] for a, is_free in zip(node.args, free, strict=True) if not is_free]  # type: ignore[index]
        if target is _prims.add.default or free[1]:
            return dependent_operand
        negative = graph.call_function(_prims.neg.default, (dependent_operand,))
        negative.meta = dict(node.meta)
        return negative
    copy = graph.node_copy(node, new.__getitem__)
    if target is _prims.where.default:
        copy.args = (copy.args[0], *(0.0 if is_free else a for a, is_free in zip(copy.args[1:], free[1:], strict=True)))
    return copy


def _keeps_linearity(node: fx.Node, dependent: Collection[fx.Node], *, affine: bool) -> bool:
    value, facts = node.meta.get("val"), facts_of(node.target)
    if facts is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    positions = {i for i, argument in enumerate(node.args) if argument in dependent}
    if len(positions) < sum(argument in dependent for argument in node.all_input_nodes):
        return False  # a dependent value is passed by keyword
    return any(
        positions <= together and (affine or all(_vanishes(node.args[i]) for i in together - positions))
        for together in facts.linear
    )


def _vanishes(value: object) -> bool:
    return is_zero(value) if isinstance(value, fx.Node) else isinstance(value, int | float) and value == 0
