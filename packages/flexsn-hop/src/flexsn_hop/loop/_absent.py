"""Computes the VJP of a step if some gradients are absent, as autograd does.

Absent gradients are not replaced by zeros, because the product of a zero and an infinite derivative would be NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["PartialVJP", "StepVJP", "is_zero"]

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)

Gradients = tuple[Any, ...]
"""A tuple of gradients, with None for each absent gradient."""


@dataclass(frozen=True, slots=True)
class PartialVJP:
    """The VJP of a step for one combination of present and absent gradients.

    Attributes:
        graph: Graph that takes the step's values and all gradients, with stand-in tensors for absent gradients, and
            returns the present results.
        results: For each result of the full VJP, True if the result is present.
    """

    graph: fx.GraphModule
    results: tuple[bool, ...]


class StepVJP:
    """Calls the VJP of a step with gradients, some of which may be absent.

    Args:
        vjp: Function of the step's values and gradients. If ``vjp`` is a graph, the graph shows on which gradients each
            result depends. Any other callable receives zeros for absent gradients.
        num_values: Number of the step's values, which are the first arguments of the VJP.
    """

    def __init__(self, vjp: Callable[..., Any], num_values: int) -> None:
        self._vjp = vjp
        self._num_values = num_values
        self._gradient_nodes: set[fx.Node] = set()  # nodes that depend on a present or absent gradient
        self._partial: dict[tuple[bool, ...], PartialVJP] = {}
        if isinstance(vjp, fx.GraphModule):
            self._gradient_nodes.update(list(vjp.graph.find_nodes(op="placeholder"))[num_values:])
            for node in vjp.graph.nodes:
                if not self._gradient_nodes.isdisjoint(node.all_input_nodes):
                    self._gradient_nodes.add(node)

    def __call__(self, values: Sequence[Any], gradients: Gradients, like: Sequence[torch.Tensor]) -> Gradients:
        """Returns the results of the VJP.

        If the VJP is a graph, a result is None if it is zeros, or if all gradients on which it depends are absent.
        ``like`` contains one tensor for each of ``gradients``, with the shape and dtype of the gradient.
        """
        if not isinstance(self._vjp, fx.GraphModule):
            filled = [zeros(t) if g is None else g for g, t in zip(gradients, like, strict=True)]
            return tuple(self._vjp(*values, *filled))
        partial = self.partial([gradient is not None for gradient in gradients])
        results = iter(partial.graph(*values, *(t if g is None else g for g, t in zip(gradients, like, strict=True))))
        return tuple(next(results) if is_present else None for is_present in partial.results)

    def partial(self, present: Sequence[bool]) -> PartialVJP:
        """Returns the VJP for a combination of present and absent gradients.

        The graph of this VJP takes a stand-in tensor, with the shape and dtype of the gradient, for each absent
        gradient.
        """
        assert isinstance(self._vjp, fx.GraphModule)
        key = tuple(present)
        if key not in self._partial:
            self._partial[key] = _Specialization(self._vjp, self._gradient_nodes).build(self._num_values, key)
        return self._partial[key]


class _Specialization:
    """Copies the graph of a VJP, without the operations for which all incoming gradients are absent."""

    def __init__(self, module: fx.GraphModule, linear: set[fx.Node]) -> None:
        self._module = module
        self._gradient_nodes = linear
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node | None] = {}
        self._arguments: dict[fx.Node, fx.Node] = {}
        self._zeros: dict[fx.Node, fx.Node] = {}

    def build(self, num_values: int, present: Sequence[bool]) -> PartialVJP:
        flags = iter([*[True] * num_values, *present])
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._arguments[node] = argument = self._graph.node_copy(node)
                self._values[node] = argument if next(flags) else None
            elif node.op == "output":
                return self._finish(node.args[0])
            else:
                self._values[node] = self._copy(node)
        raise AssertionError("a graph ends with its output")

    def _finish(self, results: Sequence[Any]) -> PartialVJP:
        matches = [self._find_result(result) for result in results]
        self._graph.output(tuple(value for value in matches if value is not None))
        self._graph.eliminate_dead_code()
        module = fx.GraphModule(self._module, self._graph, "StepVJP")
        return PartialVJP(module, tuple(value is not None for value in matches))

    def _find_result(self, result: Any) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return self._values[result] if result in self._gradient_nodes or not is_zero(result) else None

    def _copy(self, node: fx.Node) -> fx.Node | None:
        if node.op == "call_function" and any(self._values[source] is None for source in node.all_input_nodes):
            if all(self._values[source] is None for source in node.all_input_nodes if source in self._gradient_nodes):
                return None
            # This op, usually a sum, combines present and absent gradients. Absent terms of a sum are omitted.
            if node.target in _SUMS:
                return self._copy_sum(node)
        return self._copy_node(node)

    def _copy_node(self, node: fx.Node) -> fx.Node:
        return self._graph.node_copy(node, lambda source: self._find_value(source, node))

    def _find_value(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Returns the copy of a node, or zeros if the value of the node is absent."""
        value = self._values[node]
        if value is not None:
            return value
        if node not in self._zeros:
            # The node is computed from stand-ins, only for its shape. Its elements may be NaN.
            copy = self._arguments[node] if node.op == "placeholder" else self._copy_node(node)
            is_tuple = user.target is operator.getitem  # zeros replace the elements of the tuple, not the tuple
            self._zeros[node] = copy if is_tuple else self._graph.call_function(_aten.zeros_like.default, (copy,))
        return self._zeros[node]

    def _copy_sum(self, node: fx.Node) -> fx.Node | None:
        first, second = (self._values[source] for source in node.all_input_nodes)
        if second is None:
            return first
        alpha: Any = node.kwargs.get("alpha", 1)
        factor = -alpha if node.target is _aten.sub.Tensor else alpha
        return second if factor == 1 else self._graph.call_function(_aten.mul.Tensor, (second, factor))


_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
# For each operator that fills a new tensor, the position of the argument that is the value of all elements.
_FILLS = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2, _aten.scalar_tensor.default: 0}
_VIEWS = (
    *(_aten.expand.default, _aten.view.default, _aten.detach.default, _aten.alias.default, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.permute.default, _aten.t.default, _aten._to_copy.default),
)


def is_zero(node: fx.Node) -> bool:
    """True if a node creates, views or copies zeros, such as the gradient of a leaf on which no result depends."""
    if node.target in _FILLS:
        return bool(node.args[_FILLS[node.target]] == 0)
    return node.target in _ZEROS or (node.target in _VIEWS and is_zero(node.all_input_nodes[0]))


def zeros(value: Any) -> Any:
    """Returns zeros with the shape and dtype of a tensor. Returns other values unchanged."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
