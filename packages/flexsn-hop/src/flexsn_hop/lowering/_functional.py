"""Removes writes from the graphs of steps, since Inductor may add in-place operations before it lowers the graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexsn_hop._torch_private import OpOverload

__all__ = ["without_writes"]

_aten = torch.ops.aten

_SCATTERS = {
    _aten.diagonal.default: _aten.diagonal_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.as_strided.default: _aten.as_strided_scatter.default,
}
"""Maps each operator that takes a view of a tensor to the operator that replaces the elements of this view."""


class _UnknownWriteError(Exception):
    """A write cannot be replaced, because no operator computes the same value without a write."""


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph that creates a new value for each write.

    If the graph has no write, or a write that cannot be replaced, returns the graph itself.

    For example, the gradient of a step that takes a diagonal is a tensor of zeros to which a diagonal is written. The
    edges of a graph without writes show on which gradients a result depends, and whether the result is zeros.
    """
    if not any(_is_write(node) for node in module.graph.nodes):
        return module
    try:
        return _Rewrite(module).run()
    except _UnknownWriteError:
        return module


def _is_write(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


class _Rewrite:
    """Copies a graph. Nodes of the original graph stand for memory, and nodes of the copy stand for values."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        self._parents: dict[fx.Node, fx.Node] = {}  # maps a view to the memory of which it is a view
        self._written_memory: dict[fx.Node, fx.Node] = {}  # maps the result of a write to the memory that was written
        self._versions: dict[fx.Node, int] = {}

    def run(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if _is_write(node):
                self._write(node)
                continue
            self._values[node] = self._graph.node_copy(node, self._read)
            if isinstance(node.target, OpOverload) and node.target.is_view:
                self._parents[node] = self._find_memory(node.all_input_nodes[0])
                self._versions[node] = self._versions.get(self._find_root(node), 0)
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._module, self._graph)

    def _find_memory(self, node: fx.Node) -> fx.Node:
        return self._written_memory.get(node, node)

    def _find_root(self, node: fx.Node) -> fx.Node:
        while node in self._parents:
            node = self._parents[node]
        return node

    def _read(self, node: fx.Node) -> Any:
        """Returns the current value of memory. If the source of a view has been written to, creates the view again."""
        node = self._find_memory(node)
        if node in self._parents and self._versions[node] != self._versions.get(self._find_root(node), 0):
            self._values[node] = self._graph.node_copy(node, self._read)
            self._versions[node] = self._versions[self._find_root(node)]
        return self._values[node]

    def _write(self, node: fx.Node) -> None:
        into = node.args[0] if node.args else None
        schema: Any = node.target._schema  # type: ignore[union-attr]
        name = schema.name.removeprefix("aten::")
        writes = [argument.is_write for argument in schema.arguments]
        is_usual = isinstance(into, fx.Node) and writes == [True, *[False] * (len(writes) - 1)]
        packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
        op = getattr(packet, schema.overload_name or "default", None)
        if not is_usual or op is None:
            raise _UnknownWriteError
        assert isinstance(into, fx.Node)
        into = self._find_memory(into)
        new = self._graph.call_function(op, *fx.map_arg((node.args, node.kwargs), self._read))
        new.meta = {**node.meta}
        self._written_memory[node] = into
        self._replace(into, new)

    def _replace(self, memory: fx.Node, value: fx.Node) -> None:
        if memory.op == "placeholder":
            raise _UnknownWriteError
        if memory in self._parents:
            parent = self._parents[memory]
            if memory.target not in _SCATTERS:
                raise _UnknownWriteError
            arguments, options = fx.map_arg((memory.args[1:], memory.kwargs), self._read)
            full_value = self._graph.call_function(
                _SCATTERS[memory.target], (self._read(parent), value, *arguments), options
            )
            full_value.meta = {**self._find_root(memory).meta}
            self._replace(parent, full_value)
            self._values[memory], self._versions[memory] = value, self._versions[self._find_root(memory)]
        else:
            self._values[memory] = value
            self._versions[memory] = self._versions.get(memory, 0) + 1
