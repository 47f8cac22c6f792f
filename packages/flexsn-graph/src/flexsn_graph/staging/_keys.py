"""Keys that identify equal values in two graphs of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from flexsn_graph.ir._ports import Port


class Keys:
    """Assigns equal numbers to values that two graphs of one step compute in the same way."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, graph: fx.Graph, arguments: Sequence[Port]) -> dict[fx.Node, int]:
        """A number for each node. Nodes with equal numbers have equal values."""
        results: dict[fx.Node, int] = {}
        ports = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                key: Any = next(ports)
            elif node.op == "call_function":
                key = (node.target, _freeze(node.args, results), _freeze(node.kwargs, results), _get_dtype(node))
            else:
                continue
            results[node] = self._numbers.setdefault(key, len(self._numbers))
        return results


def _freeze(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", numbers.get(value, value))
    if isinstance(value, list | tuple):
        return tuple(_freeze(v, numbers) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v, numbers)) for k, v in sorted(value.items()))
    return (type(value).__name__, repr(value))


def _get_dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)
