"""Writes graphs as text, node by node, and restores graphs from this text.

The text contains no code. Restoring a graph only imports the modules whose operators and functions the text names.

Source code would be shorter. However, a tracer that traces source code runs calls without tensor arguments, such as
`full`, and records their results as constants.
"""

from __future__ import annotations

import base64
import importlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from flexsn_hop._layout import BackwardLayout, ScanLayout
from flexsn_hop._torch_private import HigherOrderOperator, OpOverload
from flexsn_hop.errors import LoweringError

__all__ = [
    "from_text",
    "merged",
    "read_graph",
    "read_layout",
    "to_text",
    "write_graph",
    "write_layout",
]

MOST_CONSTANT_ELEMENTS = 4096

_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_aten = torch.ops.aten


# -- operators with a program as an argument ---------------------------------------------------------------------


def to_text(content: Any) -> str:
    """Encodes JSON content as an operator's argument. Base64 needs no escapes in string literals of generated code."""
    return base64.b64encode(json.dumps(content).encode()).decode()


def from_text(text: str) -> Any:
    """Decodes the result of :func:`to_text`. Tuples are returned as lists."""
    return json.loads(base64.b64decode(text))


def write_layout(layout: ScanLayout | BackwardLayout) -> dict[str, Any]:
    """Converts the layout of an operator to JSON types."""
    return asdict(layout)


def read_layout(fields: dict[str, Any]) -> ScanLayout | BackwardLayout:
    """Restores a layout from the result of :func:`write_layout`."""
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in fields.items()}
    if "scan" in values:
        values["scan"] = read_layout(values["scan"])
        return BackwardLayout(**values)
    return ScanLayout(**values)


def merged(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int] | None, size_positions: Sequence[int] | None
) -> list[Any]:
    """Merges tensors and sizes into one list of arguments. AOTInductor passes None instead of an empty list."""
    args: list[Any] = list(tensors)
    for position, size in zip(size_positions or (), sizes or (), strict=True):  # positions are in ascending order
        args.insert(position, size)
    return args


# -- writing -------------------------------------------------------------------------------------------------------


def write_graph(module: fx.GraphModule) -> list[Any]:
    """Converts the nodes of an ATen graph to JSON types.

    Inner graphs, such as the branches of `cond`, are converted in the same way.

    Raises:
        LoweringError: A node contains an object that cannot be written as text.
    """
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for node in module.graph.nodes:
        nodes.append(_write_node(module, node, numbers))
        numbers[node] = len(numbers)
    return nodes


def _write_node(module: fx.GraphModule, node: fx.Node, numbers: Mapping[fx.Node, int]) -> list[Any]:
    if node.op == "placeholder":
        return ["placeholder"]
    if node.op == "get_attr":
        return ["get_attr", _write_attribute(str(node.target), operator.attrgetter(str(node.target))(module))]
    args = _write(node.args, numbers)
    if node.op == "output":
        return ["output", args]
    if node.op == "call_function":
        return ["call", _write(node.target, numbers), args, _write(dict(node.kwargs), numbers)]
    raise LoweringError(f"the core has a node {node.op} {node.target}, which cannot be written as text")


def _write_attribute(name: str, value: object) -> list[Any]:
    if isinstance(value, fx.GraphModule):
        return ["graph", write_graph(value)]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise LoweringError(f"the core contains {name}, a {type(value).__name__}, which cannot be written as text")
    if value.numel() > MOST_CONSTANT_ELEMENTS:
        raise LoweringError(
            f"the core creates a constant of {value.numel()} elements; at most {MOST_CONSTANT_ELEMENTS} can be part of "
            "its code: create it outside of the core"
        )
    parts = (value.tolist(), value.dtype, value.device, tuple(value.shape))
    return ["tensor", *(_write(part, {}) for part in parts)]


def _write(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Converts an argument of a node. JSON scalars are unchanged. Other values become a list that begins with a tag."""
    if value is None or isinstance(value, (str, bool)) or type(value) in (int, float):
        return value
    if isinstance(value, fx.Node):
        return ["node", numbers[value]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_write(item, numbers) for item in value]]
    if isinstance(value, dict):
        return ["dict", {key: _write(item, numbers) for key, item in value.items()}]
    if isinstance(value, slice):
        return ["slice", [_write(part, numbers) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, _TORCH_VALUES):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, OpOverload):
        return ["op", *value._schema.name.split("::"), value._overloadname]
    if isinstance(value, HigherOrderOperator):
        return ["higher order", type(value).__module__, value.name()]
    if callable(value) and _find_object(*(name := (value.__module__, value.__qualname__))) is value:
        return ["function", *name]
    raise LoweringError(
        f"the core uses {getattr(value, '__name__', value)!s} ({value!r}), which cannot be written as text; use "
        "PyTorch operators"
    )


# -- reading -------------------------------------------------------------------------------------------------------


def read_graph(nodes: list[Any]) -> fx.GraphModule:
    """Restores a graph from the result of :func:`write_graph`.

    The restored graph copies its constants in each call. Without these copies, the graph might write to a constant,
    because a compiler's pass may have replaced a copy of a constant with the constant itself.
    """
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    matches: list[fx.Node] = []
    for index, (kind, *parts) in enumerate(nodes):
        if kind == "placeholder":
            matches.append(graph.placeholder(f"argument_{index}"))
        elif kind == "get_attr":
            name = f"attribute_{index}"
            attributes[name] = value = _read_attribute(*parts[0])
            node = graph.create_node("get_attr", name)
            is_tensor = isinstance(value, torch.Tensor)
            matches.append(graph.call_function(_aten.clone.default, (node,)) if is_tensor else node)
        elif kind == "call":
            target, args, kwargs = (_read(part, matches) for part in parts)
            matches.append(graph.call_function(target, args, kwargs))
        else:
            (results,) = _read(parts[0], matches)
            matches.append(graph.output(results))
    return fx.GraphModule(attributes, graph, "Step")


def _read_attribute(kind: str, *parts: Any) -> Any:
    if kind == "graph":
        return read_graph(parts[0])
    values, dtype, device, shape = (_read(part, []) for part in parts)
    return torch.tensor(values, dtype=dtype, device=device).reshape(shape)


def _read(value: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    reader = _READERS.get(kind)
    return reader(*parts) if reader is not None else _read_container(kind, parts[0], nodes)


def _read_container(kind: str, content: Any, nodes: list[fx.Node]) -> Any:
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {key: _read(element, nodes) for key, element in content.items()}
    elements = [_read(element, nodes) for element in content]
    return elements if kind == "list" else tuple(elements) if kind == "tuple" else slice(*elements)


def _read_op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _read_higher_order(module: str, name: str) -> Any:
    importlib.import_module(module)  # importing the module registers the operator
    return getattr(torch.ops.higher_order, name)


def _find_object(module: str, name: str) -> Any:
    """Returns the object with this name in a module, or None if the object does not exist."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


_READERS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "device": torch.device,
    "torch": lambda name: getattr(torch, name),
    "op": _read_op,
    "higher order": _read_higher_order,
    "function": _find_object,
}
