"""Moves sums over elements to the end of a step's VJP. Kernels return the terms, and the sums are computed afterwards.

The gradient of a value, an input or a captured tensor that broadcasts is a sum over elements. The factors of such a sum
are multiplied into its terms: `sum(x) * y` becomes `sum(x * y)` if `y` is constant along the summed dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flexsn_graph.ir._ops import ALIAS_OPS, SUM_OP
from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._products import is_linear_in_one
from flexsn_graph.staging._views import before_sums

_aten = torch.ops.aten
_prims = torch.ops.prims

# Ops that preserve the order of elements.
_RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _prims.reshape.default,
        _prims.broadcast_in_dim.default,
    }
)


_PRODUCTS = frozenset({_prims.mul.default, _prims.div.default})
_ADDITIONS = frozenset({_prims.add.default, _prims.sub.default})


@dataclass(frozen=True, slots=True)
class _Sum:
    """A node whose elements equal the elements of `terms.sum(dims)`, in order."""

    terms: fx.Node
    dims: frozenset[int]

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the summed value."""
        shape: Sequence[int] = self.terms.meta["val"].shape
        return shape

    def broadcasts(self, shape: Sequence[int]) -> bool:
        """True if `shape` is the shape of `terms` with 1 for summed dimensions. Leading dimensions may be missing."""
        padded = [1] * (len(self.shape) - len(shape)) + list(shape)
        return padded == [1 if d in self.dims else n for d, n in enumerate(self.shape)]


def sum_last(graph: fx.Graph, arguments: Sequence[Port], results: Sequence[Port]) -> None:
    """Rewrites a lowered VJP so that no value of the step is multiplied by a sum over elements.

    Args:
        graph: the VJP. Its output is a list of nodes.
        arguments: ports of its placeholders.
        results: ports of its output's entries.
    """
    _Sums(graph, arguments).run(results)


def copy_last_sums(graph: fx.Graph, results: Sequence[Port]) -> None:
    """Copies the sums at the end of each input's gradient, because kernels omit them, but other values may use them."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    entries = list(output.args[0])
    for i, (entry, port) in enumerate(zip(entries, results, strict=True)):
        start = before_sums(entry)
        if port.role is not Role.GRAD_INPUT or start is entry:
            continue
        chain: list[fx.Node] = []
        node = entry
        while node is not start:
            chain.append(node)
            node = node.all_input_nodes[0]
        copies = {start: start}
        with graph.inserting_before(output):
            for node in reversed(chain):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        entries[i] = copies[entry]
    output.args = (entries,)
    graph.eliminate_dead_code()


class _Sums:
    def __init__(self, graph: fx.Graph, arguments: Sequence[Port]) -> None:
        self._graph = graph
        ports = iter(arguments)
        self._moving: set[fx.Node] = set()
        for node in graph.nodes:
            lifted = node.op == "placeholder" and next(ports).role is Role.LIFTED
            if (node.op == "placeholder" and not lifted) or not self._moving.isdisjoint(node.all_input_nodes):
                self._moving.add(node)
        # Values that are computed from a sum over elements.
        self._from_sums: set[fx.Node] = set()
        for node in graph.nodes:
            if node in self._moving and (node.target is SUM_OP or not self._from_sums.isdisjoint(node.all_input_nodes)):
                self._from_sums.add(node)

    def run(self, results: Sequence[Port]) -> None:
        output = next(n for n in reversed(self._graph.nodes) if n.op == "output")
        for node in list(self._graph.nodes):
            moving = [a for a in node.args if isinstance(a, fx.Node) and a in self._moving]
            if node.target in _PRODUCTS and len(moving) == 2:
                self._move(node)
        entries = list(output.args[0])
        for i, (node, port) in enumerate(zip(entries, results, strict=True)):
            if port.role is Role.GRAD_INPUT and not self._is_sum(node):
                entries[i] = self._move(node) or node
        output.args = (entries,)
        self._graph.eliminate_dead_code()

    def _is_sum(self, node: fx.Node) -> bool:
        """True if a result contains no sums before those at its end, so that a stage can write the result's terms."""
        while node.op == "call_function" and (node.target in ALIAS_OPS or node.target is SUM_OP):
            node = node.all_input_nodes[0]
        return node not in self._from_sums

    def _move(self, node: fx.Node) -> fx.Node | None:
        """Replaces a node with an equal sum over elements and returns the sum. `None` if no equal sum is found."""
        with self._graph.inserting_after(node):
            cursor = self._graph.call_function(_prims.view_of.default, (node,))  # new nodes precede this node
        summed = None
        with self._graph.inserting_before(cursor):
            result = self._find_sum(node)
            if result is not None:
                total = self._add_node(node, SUM_OP, result.terms, sorted(result.dims))
                summed = self._add_node(node, _aten.view.default, total, list(node.meta["val"].shape))
                self._from_sums |= {total, summed}
        self._graph.erase_node(cursor)
        if summed is not None:
            node.replace_all_uses_with(summed)
        return summed

    def _find_sum(self, node: fx.Node) -> _Sum | None:
        """An equivalent sum over elements, or `None` if the node cannot be expressed as such a sum."""
        if node not in self._from_sums or node.op != "call_function":
            return None
        target: Any = node.target
        if target is SUM_OP:
            value, sum_dims = node.args[:2]
            assert isinstance(value, fx.Node)
            dims: frozenset[int] = frozenset(sum_dims)  # type: ignore[arg-type]
            inner = self._find_sum(value)
            if inner is None:
                return _Sum(value, dims)
            shape = value.meta["val"].shape
            missing = len(inner.shape) - len(shape)
            return _Sum(inner.terms, inner.dims | {d + missing for d in dims}) if inner.broadcasts(shape) else None
        if target in _RESHAPES:
            (source,) = node.all_input_nodes
            return self._find_sum(source) if source.meta["val"].numel() == node.meta["val"].numel() else None
        if target in ALIAS_OPS:
            return None
        if is_linear_in_one(node):
            inner = self._find_sum(node.all_input_nodes[0])
            return inner and _Sum(self._add_node(node, target, inner.terms, *node.args[1:], **node.kwargs), inner.dims)
        return self._sum_of_two(node)

    def _sum_of_two(self, node: fx.Node) -> _Sum | None:
        target: Any = node.target
        if target not in _PRODUCTS | _ADDITIONS or len(node.all_input_nodes) != len(node.args):
            return None
        left, right = node.all_input_nodes
        first, second = self._find_sum(left), self._find_sum(right)
        if target in _ADDITIONS:
            if first is None or second is None or first.dims != second.dims or first.shape != second.shape:
                return None
            return _Sum(self._add_node(node, target, first.terms, second.terms), first.dims)
        if (first is None) == (second is None) or (second is not None and target is _prims.div.default):
            return None
        result, other = (first, right) if first is not None else (second, left)
        assert result is not None
        if not result.broadcasts(node.meta["val"].shape):
            return None
        spread = self._add_node(node, _aten.expand.default, other, list(result.shape))
        return _Sum(self._add_node(node, target, result.terms, spread), result.dims)

    def _add_node(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta["val"] = target(*values, **kwargs)
        node.stack_trace = like.stack_trace
        self._moving.add(node)
        return node
