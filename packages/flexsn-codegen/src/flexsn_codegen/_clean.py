"""From a traced function to the graph that its core is written from: pointwise ops on arguments and numbers alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_codegen._core import location_text
from flexsn_codegen._torch_private import FakeTensor
from flexsn_codegen.errors import TraceError, UnsupportedOpError

_aten, _prims = torch.ops.aten, torch.ops.prims

# They give back their argument, in another place or shape.
_ALIAS_OPS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.lift_fresh_copy.default,
    _prims.broadcast_in_dim.default,
    _prims.clone.default,
    _prims.device_put.default,
    _prims.squeeze.default,
    _prims.view_of.default,
}
# `(op, position of the value)`: filled with one value, whatever their tensor argument holds. No position: zeros.
_FILL_OPS: dict[Any, int | None] = {
    _aten._efficientzerotensor.default: None,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
    _prims.full.default: 1,
    _prims.full_like.default: 1,
    _prims.fill.default: 1,
    _prims.scalar_tensor.default: 0,
}
_EMPTY_OPS = {_aten.empty.memory_format, _prims.empty_strided.default, _prims.empty_permuted.default}
# The gradient of an argument without dimensions is a sum over the elements. The kernel returns each element's
# term, computed as if it were the sum, and it is summed up afterwards: right as long as all that follows is linear
# in it. What autograd itself writes is, and the gradient of that is again one of terms; a user's backward may not be.
_SUM_OPS = {_prims.sum.default}
_LINEAR_OPS = {_prims.convert_element_type.default, _prims.neg.default}


def cleaned(module: fx.GraphModule, name: str) -> fx.Graph:
    """Leaves pointwise ops on arguments and numbers: no aliases, no fills, no constant expressions.

    Args:
        module: on prims, without mutation, traced on stand-ins of one shape or none.
        name: of the function, for messages.

    Raises:
        UnsupportedOpError: an op that is not pointwise.
        TraceError: a tensor of several numbers that is no argument.
    """
    return _Cleaner(module, name).run()


class _Cleaner:
    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self._module = module
        self._name = name
        self._graph = fx.Graph()
        self._new: dict[fx.Node, Any] = {}
        self._sums: set[fx.Node] = set()

    def run(self) -> fx.Graph:
        for index, node in enumerate(self._module.graph.nodes):
            if node.op == "placeholder":
                new = self._graph.placeholder(f"input_{index}")
                new.meta["val"] = node.meta["val"]
                self._new[node] = new
            elif node.op == "get_attr":
                self._new[node] = self._constant(node)
            elif node.op == "call_function":
                self._new[node] = self._call(node)
            else:
                self._graph.output(tuple(self._result(entry) for entry in node.args[0]))
        self._graph.eliminate_dead_code()
        for node in self._graph.nodes:
            if node.target in _EMPTY_OPS:
                raise UnsupportedOpError(
                    f"{node.target}: {self._name} reads memory that it has not written{location_text(node)}",
                    str(node.target),
                )
        return self._graph

    def _constant(self, node: fx.Node) -> bool | int | float:
        value = getattr(self._module, str(node.target))
        if isinstance(value, FakeTensor) or not isinstance(value, Tensor) or value.numel() != 1:
            raise TraceError(f"{self._name} makes a tensor of several numbers. Pass it as an argument.")
        return _number(value)

    def _call(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target in _FILL_OPS:
            position = _FILL_OPS[target]
            value = 0 if position is None else self._argument(node.args[position])
            if isinstance(value, fx.Node):
                return value
            return _number(torch.tensor(value, dtype=node.meta["val"].dtype, device="cpu"))
        if target in _ALIAS_OPS:
            return self._alias(node)
        if target in _SUM_OPS:
            return self._sum(node)
        if target is _prims.where.default and not isinstance(condition := self._argument(node.args[0]), fx.Node):
            return self._same(node, node.args[1 if condition else 2])
        self._check_linear(node)
        return self._folded(node) if self._is_constant(node) else self._emitted(node)

    def _alias(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if before.numel() != 1 and before != after:
            raise UnsupportedOpError(
                f"{node.target} changes the shape from {list(before)} to {list(after)}; a pointwise kernel "
                f"computes element by element{location_text(node)}\nReshape the arguments before the call.",
                str(node.target),
            )
        if source in self._sums and (before == after or _inside_function(node)):
            self._sums.add(node)
        return self._argument(source)

    def _same(self, node: fx.Node, source: Any) -> Any:
        if source in self._sums:
            self._sums.add(node)
        return self._argument(source)

    def _sum(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        if source.meta["val"].dim() == 0:
            return self._same(node, source)
        if node.meta["val"].numel() != 1 or _inside_function(node):
            raise UnsupportedOpError(
                f"{node.target} combines elements; a pointwise kernel computes each by itself{location_text(node)}",
                str(node.target),
            )
        self._sums.add(node)
        return self._argument(source)

    def _check_linear(self, node: fx.Node) -> None:
        sums = [isinstance(a, fx.Node) and a in self._sums for a in node.args]
        if not any(sums):
            return
        target: Any = node.target
        # Of a sum or zero, a selection keeps one for all its terms.
        selected = [s or self._argument(a) == 0 for s, a in zip(sums, node.args, strict=True)]
        linear = (
            target in _LINEAR_OPS
            or (target is _prims.where.default and not sums[0] and all(selected[1:]))
            or (target in {_prims.add.default, _prims.sub.default} and all(sums))
            or (target is _prims.mul.default and not (all(sums) and _inside_function(node)))
            or (target is _prims.div.default and sums == [True, False])
        )
        if not linear:
            raise UnsupportedOpError(
                f"{target} on the gradient of an argument without dimensions, which is a sum over the "
                f"elements{location_text(node)}\nPass the argument expanded to the others' shape.",
                str(target),
            )
        self._sums.add(node)

    def _is_constant(self, node: fx.Node) -> bool:
        inputs = node.all_input_nodes
        constant = bool(inputs) and not any(isinstance(self._new[n], fx.Node) for n in inputs)
        return constant and isinstance(node.meta.get("val"), Tensor)

    def _folded(self, node: fx.Node) -> bool | int | float:
        """The value of an op on numbers alone, rounded as its dtype rounds."""
        target: Any = node.target

        def value(a: Any) -> Any:
            if not isinstance(a, fx.Node):
                return a
            return torch.tensor(self._new[a], dtype=a.meta["val"].dtype, device="cpu")

        return _number(target(*map(value, node.args), **node.kwargs))

    def _emitted(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise UnsupportedOpError(
                f"{target} is random{location_text(node)}\nDraw the numbers before the call, and pass them as an "
                "argument.",
                str(target),
            )
        arguments = fx.node.map_arg(node.args, self._argument)
        name = "item" if target is operator.getitem else getattr(target, "_opname", None)
        new = self._graph.create_node("call_function", target, arguments, dict(node.kwargs), name=name)
        new.meta["val"] = node.meta.get("val")
        new.stack_trace = node.stack_trace
        return new

    def _argument(self, value: Any) -> Any:
        return self._new[value] if isinstance(value, fx.Node) else value

    def _result(self, entry: fx.Node) -> fx.Node:
        entry = self._unconverted(entry)
        new = self._argument(entry)
        if isinstance(new, fx.Node):
            return new
        value = entry.meta["val"]
        literal = self._graph.call_function(_prims.scalar_tensor.default, (new,), {"dtype": value.dtype})
        literal.meta["val"] = value
        return literal

    def _unconverted(self, entry: fx.Node) -> fx.Node:
        """A sum before its last conversion: the dtype may be too narrow for its terms."""
        node = entry
        while node.target in _ALIAS_OPS or node.target is _prims.convert_element_type.default:
            node = node.all_input_nodes[0]
        return node if node in self._sums else entry


def _inside_function(node: fx.Node) -> bool:
    """Whether the user's function called the op; autograd's own ops have no line."""
    return bool(location_text(node))


def _number(tensor: Tensor) -> bool | int | float:
    value = tensor.item()
    assert isinstance(value, bool | int | float)
    return value
