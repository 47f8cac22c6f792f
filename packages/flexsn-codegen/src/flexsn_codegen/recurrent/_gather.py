"""Replaces a selection among many earlier steps by one load.

A value with delays is a sum over earlier steps. Each element has a number that selects one of these steps. The number
is the same in all steps of the sequence. A summand is zero at elements that select another step. The loads of all
summands are replaced by one load at an address that depends on the number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from flexsn_graph import Port, Role, Stage, StepGraph, View

_prims = torch.ops.prims
_FEWEST = 4  # the smallest number of loads that one load may replace
_MOST_SUMS = 2  # the largest number of gathered values in a sum: a sum of two values does not depend on their order


@dataclass(frozen=True, slots=True)
class Gather:
    """A load that reads each element of a value at one of several steps.

    Attributes:
        view: the value at the first of these steps.
        number: port of role `AHEAD`, with the number of a step for each element, as an integer in floating point.
        first: the number of the step of `view`.
        count: number of steps. Elements with other step numbers are not loaded.
        back: True if larger numbers mean earlier steps.
    """

    view: View
    number: Port
    first: int
    count: int
    back: bool


@dataclass(frozen=True, slots=True)
class _Term:
    """A summand: a value that is computed from one load, and selected where a number equals `step`.

    Attributes:
        kind: a key that is equal for equal computations with a load.
    """

    number: fx.Node
    step: int
    load: fx.Node
    value: fx.Node
    kind: object


def split_gathers(
    stage: Stage, steps: Mapping[Port, tuple[Port, int]], *, back: Callable[[Port], bool], first: int
) -> tuple[Stage, Stage, list[Gather]] | None:
    """Splits a stage that selects among earlier steps. The first part computes the step numbers, once for all steps.

    Args:
        steps: for each value that is another step of a value in memory, the value in memory and the distance in steps.
        back: returns True if a greater distance from a value means an earlier step.
        first: index of the first value that the first part passes to the second. These values have the role `AHEAD`.

    Returns:
        The two parts, and the loads of the second part. The second part reads the step numbers, and then the loaded
        values. `None` if the stage is not a selection of this form, or also reads other values.
    """
    return _Gathering(stage, steps, back, first).run()


class _Gathering:
    def __init__(
        self, stage: Stage, steps: Mapping[Port, tuple[Port, int]], back: Callable[[Port], bool], first: int
    ) -> None:
        self._stage, self._steps, self._back, self._first = stage, steps, back, first
        placeholders = stage.graph.placeholders
        self._loads = {n: stage.reads[p.index] for p, n in placeholders.items() if p.role is Role.INPUT}
        self._lifted = {n: p for p, n in placeholders.items() if p.role is Role.LIFTED}
        self._loads_of: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in stage.graph.graph.nodes:
            direct = frozenset([node]) if node in self._loads else frozenset[fx.Node]()
            self._loads_of[node] = direct.union(*(self._loads_of[operand] for operand in node.all_input_nodes))

    def run(self) -> tuple[Stage, Stage, list[Gather]] | None:
        groups: dict[fx.Node, list[list[_Term]]] = {}
        for entry in self._stage.graph.entries:
            if not isinstance(entry, fx.Node):
                return None
            result = self._group_terms(entry)
            if result is None:
                return None
            groups[entry] = result
        return self._build(groups) if len(groups) == len(self._stage.writes) else None

    def _group_terms(self, entry: fx.Node) -> list[list[_Term]] | None:
        """The summands of a result, grouped by the node of their number and by their computation.

        `None` if the result is not a sum of enough selected values at consecutive steps.
        """
        results: dict[tuple[object, ...], list[_Term]] = {}
        pending: list[Any] = [entry]
        while pending:
            node = pending.pop()
            if not isinstance(node, fx.Node):
                return None
            if node.target is _prims.add.default:
                pending += node.args
                continue
            term = self._match_term(node)
            if term is None:
                return None
            source, distance = self._steps[self._loads[term.load].source]
            results.setdefault((term.number, term.kind, source, distance - term.step), []).append(term)
        groups = [sorted(group, key=lambda term: term.step) for group in results.values()]
        is_complete = all([t.step for t in g] == [*range(g[0].step, g[0].step + len(g))] for g in groups)
        if not is_complete or len(groups) > _MOST_SUMS or any(len(group) < _FEWEST for group in groups):
            return None
        return groups

    def _match_term(self, node: fx.Node) -> _Term | None:
        if node.target is not _prims.where.default or node.args[2] != 0 or isinstance(node.args[2], fx.Node):
            return None
        condition, value = node.args[:2]
        if not isinstance(condition, fx.Node) or not isinstance(value, fx.Node) or len(self._loads_of[value]) != 1:
            return None
        if condition.target is not _prims.eq.default:
            return None
        number, step = condition.args
        (load,) = self._loads_of[value]
        if not isinstance(number, fx.Node) or self._loads_of[number] or not isinstance(step, int | float):
            return None
        if step != int(step) or self._loads[load].source not in self._steps or self._loads[load].calls:
            return None
        return _Term(number, int(step), load, value, self._make_key(value, load))

    def _make_key(self, node: Any, load: fx.Node) -> object:
        """A key that is equal for equal computations with a load."""
        if node is load:
            return "load"
        if not isinstance(node, fx.Node) or load not in self._loads_of[node]:
            return type(node).__name__, node
        return node.target, *(self._make_key(a, load) for a in node.args), *sorted(node.kwargs.items())

    def _build(self, groups: Mapping[fx.Node, list[list[_Term]]]) -> tuple[Stage, Stage, list[Gather]]:
        stage, terms = self._stage, [group[0] for result_groups in groups.values() for group in result_groups]
        numbers = list(dict.fromkeys(term.number for term in terms))
        ports = {node: Port(Role.AHEAD, self._first + i) for i, node in enumerate(numbers)}
        views = {n: View(port, (), stage.shape, n.meta["val"].dtype) for n, port in ports.items()}
        before = self._extract_part(numbers, {}, tuple(views.values()))
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        arguments: list[Port] = []
        read_views: list[View] = []

        def read(view: View, like: fx.Node) -> fx.Node:
            node = graph.placeholder(f"read_{len(read_views)}")
            node.meta["val"] = like.meta["val"]
            arguments.append(Port(Role.INPUT, len(read_views)))
            read_views.append(view)
            return node

        for node in numbers:
            copies[node] = read(views[node], node)
        gathers: dict[tuple[fx.Node, Port, int, int], tuple[Gather, fx.Node]] = {}
        for result_groups in groups.values():
            for group in result_groups:
                term = group[0]
                view = self._loads[term.load]
                key = (term.number, view.source, term.step, len(group))
                if key not in gathers:
                    source, _ = self._steps[view.source]
                    gather = Gather(view, ports[term.number], term.step, len(group), self._back(source))
                    gathers[key] = gather, read(view, term.load)
        for node, port in self._lifted.items():
            copies[node] = graph.node_copy(node)
            arguments.append(port)
        results = []
        for result_groups in groups.values():
            sums = []
            for group in result_groups:
                term = group[0]
                group_copies = {
                    **copies,
                    term.load: gathers[term.number, self._loads[term.load].source, term.step, len(group)][1],
                }
                inside = self._test_inside(graph, copies[term.number], term, len(group))
                value = self._copy(graph, term.value, group_copies)
                sums.append(_call(graph, _prims.where.default, (inside, value, 0.0), term.value))
            total = sums[0]
            for other in sums[1:]:
                total = _call(graph, _prims.add.default, (total, other), other)
            results.append(total)
        graph.output(tuple(results))
        after = self._make_stage(graph, arguments, read_views, stage.writes)
        return before, after, [gather for gather, _ in gathers.values()]

    def _test_inside(self, graph: fx.Graph, number: fx.Node, term: _Term, count: int) -> fx.Node:
        """A node that is True at elements whose number is that of one of the group's `count` steps."""
        low = _call(graph, _prims.ge.default, (number, float(term.step)), term.number, torch.bool)
        high = _call(graph, _prims.le.default, (number, float(term.step + count - 1)), term.number, torch.bool)
        floor = _call(graph, _prims.floor.default, (number,), term.number)
        is_integer = _call(graph, _prims.eq.default, (floor, number), term.number, torch.bool)
        within = _call(graph, _prims.bitwise_and.default, (low, high), term.number, torch.bool)
        return _call(graph, _prims.bitwise_and.default, (within, is_integer), term.number, torch.bool)

    def _copy(self, graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        needed, pending = set[fx.Node](), [node]
        while pending:
            other = pending.pop()
            if other not in needed and other not in copies:
                needed.add(other)
                pending += other.all_input_nodes
        for other in self._stage.graph.graph.nodes:
            if other in needed:
                copies[other] = graph.node_copy(other, copies.__getitem__)
        return copies[node]

    def _extract_part(self, results: list[fx.Node], copies: dict[fx.Node, fx.Node], writes: tuple[View, ...]) -> Stage:
        """The stage that computes some nodes from lifted tensors."""
        graph, arguments = fx.Graph(), []
        for node, port in self._lifted.items():
            copies[node] = graph.node_copy(node)
            arguments.append(port)
        graph.output(tuple(self._copy(graph, node, copies) for node in results))
        return self._make_stage(graph, arguments, [], writes)

    def _make_stage(self, graph: fx.Graph, arguments: list[Port], reads: list[View], writes: tuple[View, ...]) -> Stage:
        outputs = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
        step = StepGraph(graph, tuple(arguments), outputs, self._stage.graph.layouts)
        return replace(self._stage, graph=step, reads=tuple(reads), writes=writes)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, dtype: torch.dtype | None = None
) -> fx.Node:
    node = graph.call_function(target, args)
    value = like.meta["val"]
    node.meta["val"] = value if dtype is None else torch.empty(value.shape, dtype=dtype, device="meta")
    return node
