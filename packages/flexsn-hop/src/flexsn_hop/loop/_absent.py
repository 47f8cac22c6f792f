"""A step's VJP where some gradients did not come: absent, as in autograd, and not zero.

A zero would meet infinite derivatives, and be NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["StepVJP", "is_zero"]

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)

Gradients = tuple[Any, ...]
"""Tensors, and None where nothing flowed."""


class StepVJP:
    """Calls the VJP of a step with gradients of which some may be absent.

    Args:
        vjp: It takes the values of the step and gradients. Of a graph it is known what depends on which
            gradient; any other callable gets zeros for what is absent.
        num_values: How many values of the step it takes.
    """

    def __init__(self, vjp: Callable[..., Any], num_values: int) -> None:
        self._vjp = vjp
        self._linear: set[fx.Node] = set()  # what depends on a gradient, whether it came or not
        self._results: Sequence[Any] | None = None
        if isinstance(vjp, fx.GraphModule):
            self._linear.update(list(vjp.graph.find_nodes(op="placeholder"))[num_values:])
            for node in vjp.graph.nodes:
                if not self._linear.isdisjoint(node.all_input_nodes):
                    self._linear.add(node)
            (output,) = vjp.graph.find_nodes(op="output")
            results: Any = output.args[0]
            self._results = results

    def __call__(self, values: Sequence[Any], gradients: Gradients, like: Sequence[torch.Tensor]) -> Gradients:
        """Gradients of what the VJP gives them for; None for zeros, and for what depends on absent gradients alone.

        ``like`` has a tensor for each of ``gradients``, with its shape and dtype.
        """
        whole = all(gradient is not None for gradient in gradients)
        if whole or not isinstance(self._vjp, fx.GraphModule):
            filled = [zeros(t) if g is None else g for g, t in zip(gradients, like, strict=True)]
            found = tuple(self._vjp(*values, *filled))
        else:
            found = _Run(self._vjp, self._linear).results((*values, *gradients), like)
        if self._results is None:
            return found
        return tuple(
            value if result in self._linear or not is_zero(result) else None
            for value, result in zip(found, self._results, strict=True)
        )


class _Run:
    """One run through a graph with absent arguments."""

    def __init__(self, module: fx.GraphModule, linear: set[fx.Node]) -> None:
        self._module = module
        self._linear = linear
        self._values: dict[fx.Node, Any] = {}
        self._zeros: dict[fx.Node, Any] = {}

    def results(self, arguments: Sequence[Any], like: Sequence[torch.Tensor]) -> Gradients:
        nodes = self._module.graph.nodes
        placeholders = self._module.graph.find_nodes(op="placeholder")
        self._values.update(zip(placeholders, arguments, strict=True))
        for node, tensor in zip(list(placeholders)[len(arguments) - len(like) :], like, strict=True):
            if self._values[node] is None:
                self._zeros[node] = zeros(tensor)
        for node in nodes:
            if node.op == "get_attr":
                self._values[node] = operator.attrgetter(node.target)(self._module)
            elif node.op == "call_function":
                self._values[node] = self._call(node)
            elif node.op == "output":
                return tuple(self._values[r] if isinstance(r, fx.Node) else r for r in node.args[0])
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node) -> Any:
        if any(self._values[source] is None for source in node.all_input_nodes):
            if all(self._values[source] is None for source in node.all_input_nodes if source in self._linear):
                return None
            # Gradients that came meet others that did not: mostly in a sum, which is of those that came.
            if node.target in _SUMS:
                return self._sum(node)
        return self._apply(node)

    def _apply(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        target: Any = node.target
        return target(*args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        """The value of a node, zeros for an absent one."""
        value = self._values[node]
        if value is not None:
            return value
        if node not in self._zeros:
            # What it would be for zeros tells the shape; its numbers may be NaN.
            self._zeros[node] = fx.node.map_aggregate(self._apply(node), zeros)
        return self._zeros[node]

    def _sum(self, node: fx.Node) -> Any:
        first, second = (self._values[source] for source in node.all_input_nodes)
        if second is None:
            return first
        alpha: Any = node.kwargs.get("alpha", 1)
        factor = -alpha if node.target is _aten.sub.Tensor else alpha
        return second if factor == 1 else second * factor


_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
# By operator: the position of the number that it fills with.
_FILLS = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2, _aten.scalar_tensor.default: 0}
_VIEWS = (
    *(_aten.expand.default, _aten.view.default, _aten.detach.default, _aten.alias.default, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.permute.default, _aten.t.default, _aten._to_copy.default),
)


def is_zero(node: fx.Node) -> bool:
    """True for zeros that a graph makes, such as the gradient of a leaf that nothing depends on."""
    if node.target in _FILLS:
        return bool(node.args[_FILLS[node.target]] == 0)
    return node.target in _ZEROS or (node.target in _VIEWS and is_zero(node.all_input_nodes[0]))


def zeros(value: Any) -> Any:
    """Zeros in the place of a tensor."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
