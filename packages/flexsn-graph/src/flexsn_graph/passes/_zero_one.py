"""Detects results of a step that are zeros and ones for all arguments."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from flexsn_graph.ir._ops import FILL_OPS
from flexsn_graph.ir._ports import Port
from flexsn_graph.ir._step_graph import StepGraph

_prims, _aten = torch.ops.prims, torch.ops.aten

# For each op, the positions of the operands that must be zeros and ones so that the result consists of zeros and ones.
_BINARY_OPERANDS: dict[object, tuple[int, ...]] = {
    _prims.convert_element_type.default: (0,),
    _prims.mul.default: (0, 1),
    _prims.maximum.default: (0, 1),
    _prims.minimum.default: (0, 1),
    _prims.where.default: (1, 2),
    _aten.where.self: (1, 2),
}


def not_zero_one(step: StepGraph, result: int, given: Collection[Port] = ()) -> fx.Node | None:
    """Finds a node on which a result depends and that may be neither 0 nor 1. `None` if there is no such node.

    The answer is derived from the operations. Comparisons are 0 or 1, and so are products, selections, maxima and
    minima of such values, and 1 minus such a value.

    Args:
        result: index among the step's results.
        given: arguments that always consist of zeros and ones.
    """
    visited = {step.placeholders[port] for port in given}
    waiting: list[object] = [step.entries[result]]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, fx.Node) or value in visited or _is_flag(value):
            continue
        visited.add(value)
        operands = _list_binary_operands(value)
        if operands is None or any(not isinstance(operand, fx.Node) and operand not in (0, 1) for operand in operands):
            return value
        waiting += operands
    return None


def _is_flag(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _list_binary_operands(node: fx.Node) -> list[object] | None:
    """The operands that must be zeros and ones so that `node` is 0 or 1. `None` if `node` may have any value."""
    if node.target in FILL_OPS:
        position = FILL_OPS[node.target]
        return [0 if position is None else node.args[position]]
    if node.target is _prims.sub.default and node.args[0] == 1:
        return [node.args[1]]
    positions = _BINARY_OPERANDS.get(node.target)
    return None if positions is None or node.op != "call_function" else [node.args[i] for i in positions]
