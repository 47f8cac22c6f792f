"""Detects steps that have no effect wherever some of their inputs are 0 or less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from flexsn_graph.ir._ops import FILL_OPS
from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._step_graph import StepGraph

_prims, _aten = torch.ops.prims, torch.ops.aten

_SELECTIONS = (_prims.where.default, _aten.where.self)
_ABOVE_ZERO = (_prims.gt.default, _aten.gt.Scalar)
_SAME_VALUE = (_prims.convert_element_type.default,)


def ends_early(step: StepGraph, counts: Collection[int]) -> bool:
    """True if all outputs are zero and all states stay unchanged wherever the inputs in `counts` are 0 or less.

    The answer is derived from comparisons of the inputs with 0, selections by these comparisons, and sums with zeros.

    Args:
        step: a forward graph.
        counts: indices of the inputs.

    Example:
        >>> def core(x, left, v):
        ...     return torch.where(left > 0, x + v, 0.0), torch.where(left > 0, x, v)
        >>> step = trace_step(core, 2, 1, 1, (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(3)))
        >>> ends_early(step.forward, [1]), ends_early(step.forward, [])
        (True, False)
    """
    if not counts:
        return False
    placeholders = step.placeholders
    not_positive = {placeholders[Port(Role.INPUT, i)] for i in counts}
    values: dict[fx.Node, Any] = {}  # maps a node to an equal node or a number

    def resolve(argument: Any) -> Any:
        return values.get(argument, argument) if isinstance(argument, fx.Node) else argument

    for node in step.graph.nodes:
        if node.op == "call_function":
            result = simplify(node, not_positive, resolve)
            if result is not None:
                values[node] = result
    return all(
        _has_no_effect(port, resolve(entry), placeholders)
        for port, entry in zip(step.results, step.entries, strict=True)
    )


def _has_no_effect(port: Port, value: Any, placeholders: dict[Port, fx.Node]) -> bool:
    if port.role is Role.OUTPUT:
        return is_number(value, 0)
    if port.role is Role.STATE:
        return value is placeholders.get(port)
    return True  # an intermediate that is saved for a backward may differ, because no backward uses `ends_early`


def simplify(node: fx.Node, not_positive: Collection[fx.Node], resolve: Any) -> Any:
    """The node or the number that equals the result of `node`. `None` if no such node or number is known."""
    arguments = [resolve(argument) for argument in node.args]
    if node.target in _ABOVE_ZERO and node.args[0] in not_positive and is_number(arguments[1], 0):
        return False
    if node.target in _SELECTIONS:
        condition, if_true, if_false = arguments
        if isinstance(condition, fx.Node):
            return if_true if if_true is if_false or (is_number(if_true, 0) and is_number(if_false, 0)) else None
        return if_true if condition else if_false
    if node.target in FILL_OPS:
        position = FILL_OPS[node.target]
        return 0 if position is None else arguments[position]
    if node.target in _SAME_VALUE and is_number(arguments[0], 0):
        return 0
    if node.target is _prims.add.default:
        left, right = arguments
        return right if is_number(left, 0) else left if is_number(right, 0) else None
    return None


def is_number(value: Any, number: int) -> bool:
    return isinstance(value, bool | int | float) and value == number
