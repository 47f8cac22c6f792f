"""Splits a stage into the part that only depends on values of earlier steps, and the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from flexsn_graph import Port, Role, Stage, StepGraph, View

# A stage is only split if the first part has at least this number of loads, and passes at most this number of values to
# the second part. More values would occupy the registers that the split frees.
_FEWEST_LOADS, _MOST_VALUES = 2, 4


def split_early(stage: Stage, shifted: Collection[Port], first: int) -> tuple[Stage, Stage] | None:
    """Splits a stage into a part whose only values of steps are `shifted` values, and the remaining part.

    Args:
        first: index of the first value that the first part passes to the second. These values have the role `AHEAD`.

    Returns:
        The two parts, or `None` if a split is not worthwhile.
    """
    graph = stage.graph
    reads = {n: stage.reads[p.index] for p, n in graph.placeholders.items() if p.role is Role.INPUT}
    loads = {node for node, view in reads.items() if view.source in shifted and node.users}
    fixed = {node for port, node in graph.placeholders.items() if port.role is Role.LIFTED}
    early = set(loads)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            inputs = node.all_input_nodes
            if all(one in early or one in fixed for one in inputs):
                (fixed if all(one in fixed for one in inputs) else early).add(node)
    late = [n for n in graph.graph.nodes if n.op == "call_function" and n not in early and n not in fixed]
    used = {one for node in late for one in node.all_input_nodes} | {n for n in graph.entries if isinstance(n, fx.Node)}
    given = [node for node in graph.graph.nodes if node in early and node in used and node.op == "call_function"]
    taken = loads - used
    if any(node.meta["val"].dtype == torch.bool for node in given):
        return None
    if not given or len(given) > _MOST_VALUES or len(taken) < _FEWEST_LOADS:
        return None
    ports = [Port(Role.AHEAD, first + i) for i in range(len(given))]
    views = [View(p, (), stage.shape, n.meta["val"].dtype) for p, n in zip(ports, given, strict=True)]
    before = _part(stage, reads, given, dict[fx.Node, View](), views)
    behind = _part(stage, reads, graph.entries, dict(zip(given, views, strict=True)), stage.writes)
    return before, behind


def _part(
    stage: Stage,
    reads: dict[fx.Node, View],
    results: Sequence[Any],
    known: dict[fx.Node, View],
    writes: Sequence[View],
) -> Stage:
    """The part of a stage that computes some nodes of the stage's graph.

    Args:
        results: the nodes.
        known: nodes that the part does not compute, with the values that it reads instead.
    """
    needed, waiting = set[fx.Node](), [node for node in results if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in known else node.all_input_nodes
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    arguments: list[Port] = []
    seen_as: list[View] = []
    sources = {**reads, **known}
    for node in stage.graph.graph.nodes:
        if node in needed and node in sources:
            new[node] = graph.placeholder(f"read_{len(seen_as)}")
            new[node].meta.update(node.meta)
            arguments.append(Port(Role.INPUT, len(seen_as)))
            seen_as.append(sources[node])
    for port, node in stage.graph.placeholders.items():
        if node in needed and port.role is Role.LIFTED:
            new[node] = graph.node_copy(node)
            arguments.append(port)
    for node in stage.graph.graph.nodes:
        if node in needed and node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[one] if isinstance(one, fx.Node) else one for one in results))
    used = {port.index for port in arguments if port.role is Role.LIFTED}
    layouts = {i: layout for i, layout in stage.graph.layouts.items() if i in used}
    outputs = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
    made = StepGraph(graph, tuple(arguments), outputs, layouts)
    return replace(stage, graph=made, reads=tuple(seen_as), writes=tuple(writes))
