"""Detects steps with products that have no effect wherever some of their inputs are 0 or less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.passes._ends import is_number, simplify
from flexsn_graph.staging._staged_step import Product, StagedStep

_RESULTS = frozenset({Role.OUTPUT, Role.STATE})


def staged_ends_early(staged: StagedStep, counts: Collection[int]) -> bool:
    """True if a step with products has no effect wherever the inputs in `counts` are 0 or less.

    All outputs are then zero, and all states stay unchanged. See `ends_early`, which accepts steps without products.

    Args:
        staged: a forward step.
        counts: indices of the inputs.
    """
    if not counts:
        return False
    counting = {Port(Role.INPUT, i) for i in counts}
    number_by_port: dict[Port, Any] = {}  # maps a value of the step to the number that it equals
    for part in staged.parts:
        if isinstance(part, Product):
            if part.result.source.role in _RESULTS:
                return False
            continue
        inputs = {part.graph.placeholders.get(Port(Role.INPUT, k)): view for k, view in enumerate(part.reads)}
        not_positive = {node for node, view in inputs.items() if node is not None and view.source in counting}
        values = {node: number_by_port[view.source] for node, view in inputs.items() if view.source in number_by_port}

        def resolve(argument: Any, values: dict[Any, Any] = values) -> Any:
            return values.get(argument, argument) if isinstance(argument, fx.Node) else argument

        for node in part.graph.graph.nodes:
            if node.op == "call_function":
                equal_value = simplify(node, not_positive, resolve)
                if equal_value is not None:
                    values[node] = equal_value
        for entry, view in zip(part.graph.entries, part.writes, strict=True):
            result, port = resolve(entry), view.source
            if port.role is Role.OUTPUT and not is_number(result, 0):
                return False
            if port.role is Role.STATE:
                read = inputs.get(result) if isinstance(result, fx.Node) else None
                if read is None or read.source != port or read.calls or view.calls:
                    return False
            if not view.calls and isinstance(result, bool | int | float):
                number_by_port[port] = result
    return True
