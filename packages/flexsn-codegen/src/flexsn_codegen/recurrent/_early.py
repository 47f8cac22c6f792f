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
    """Splits a stage into a part that reads no values of steps other than `shifted` values, and the rest.

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
            if all(operand in early or operand in fixed for operand in inputs):
                (fixed if all(operand in fixed for operand in inputs) else early).add(node)
    late = [n for n in graph.graph.nodes if n.op == "call_function" and n not in early and n not in fixed]
    used = {operand for node in late for operand in node.all_input_nodes} | {
        n for n in graph.entries if isinstance(n, fx.Node)
    }
    passed = [node for node in graph.graph.nodes if node in early and node in used and node.op == "call_function"]
    moved_loads = loads - used
    if any(node.meta["val"].dtype == torch.bool for node in passed):
        return None
    if not passed or len(passed) > _MOST_VALUES or len(moved_loads) < _FEWEST_LOADS:
        return None
    ports = [Port(Role.AHEAD, first + i) for i in range(len(passed))]
    views = [View(p, (), stage.shape, n.meta["val"].dtype) for p, n in zip(ports, passed, strict=True)]
    before = _extract_part(stage, reads, passed, dict[fx.Node, View](), views)
    after = _extract_part(stage, reads, graph.entries, dict(zip(passed, views, strict=True)), stage.writes)
    return before, after


def _extract_part(
    stage: Stage,
    reads: dict[fx.Node, View],
    results: Sequence[Any],
    view_by_node: dict[fx.Node, View],
    writes: Sequence[View],
) -> Stage:
    """The part of a stage that computes some nodes of the stage's graph.

    Args:
        results: the nodes.
        view_by_node: nodes that the part does not compute, with the values that it reads instead.
    """
    needed, pending = set[fx.Node](), [node for node in results if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [] if node in view_by_node else node.all_input_nodes
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    arguments: list[Port] = []
    read_views: list[View] = []
    sources = {**reads, **view_by_node}
    for node in stage.graph.graph.nodes:
        if node in needed and node in sources:
            copies[node] = graph.placeholder(f"read_{len(read_views)}")
            copies[node].meta.update(node.meta)
            arguments.append(Port(Role.INPUT, len(read_views)))
            read_views.append(sources[node])
    for port, node in stage.graph.placeholders.items():
        if node in needed and port.role is Role.LIFTED:
            copies[node] = graph.node_copy(node)
            arguments.append(port)
    for node in stage.graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[result] if isinstance(result, fx.Node) else result for result in results))
    used = {port.index for port in arguments if port.role is Role.LIFTED}
    layouts = {i: layout for i, layout in stage.graph.layouts.items() if i in used}
    outputs = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
    step = StepGraph(graph, tuple(arguments), outputs, layouts)
    return replace(stage, graph=step, reads=tuple(read_views), writes=tuple(writes))
