"""Properties of the nodes of a Dynamo graph."""

from __future__ import annotations

from torch import Tensor, fx


def example(node: object) -> Tensor | None:
    """Returns the example of a node, a tensor without data; `None` if the node has no such example."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def is_written(node: object) -> bool:
    """True if the graph writes to the memory of a node's tensor. Also True if this tensor is unknown."""
    tensor = example(node)
    return tensor is None or tensor._version != 0


def is_scan(node: object) -> bool:
    """True if a node is a scan over time."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return getattr(node.target, "__name__", "") == "flex_sn_scan"
