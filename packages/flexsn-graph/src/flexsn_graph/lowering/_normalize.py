"""Turns a lowered graph into the closed set of ops that kernels are generated from.

The result consists of pointwise ops on homogeneous dtypes (prims), with Python scalars for all constants. It has no
aliases, sums, duplicates or unused nodes, and the names of its nodes depend on the graph alone. `check_positions` has
already proved that aliases and sums can be left out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph._torch_private import FakeTensor
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.errors import CaptureError, NonPointwiseError, StatefulCoreError
from flexsn_graph.ir._ops import ALIAS_OPS, EMPTY_OPS, FILL_OPS, SUM_OP, TERMS, UNIFORM, facts_of

_prims = torch.ops.prims


def normalize(module: fx.GraphModule, names: Sequence[str]) -> fx.Graph:
    """Turns a lowered and checked graph into a normalised graph.

    Args:
        module: the lowered graph, with a fake value on each placeholder.
        names: new names of the placeholders.

    Returns:
        A graph with a tuple as its output. Each entry is a node, or `None` where the recorded entry is `None`. Every
        node has `meta["val"]` (a fake tensor) and, where known, a stack trace that ends in the user's line.

    Raises:
        CaptureError: the core creates a constant that is not a single number.
        NonPointwiseError: the core reads memory that it has not written.
    """
    return _Normalizer(module, names).run()


class _Normalizer:
    def __init__(self, module: fx.GraphModule, names: Sequence[str]) -> None:
        self._module = module
        self._names = names
        self._graph = fx.Graph()
        # Maps an old node to its replacement, which is a new node or a constant.
        self._replacements: dict[fx.Node, Any] = {}
        self._node_by_key: dict[tuple[Any, ...], fx.Node] = {}

    def run(self) -> fx.Graph:
        names = iter(self._names)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                new = self._graph.placeholder(next(names))
                new.meta["val"] = node.meta["val"]
                self._replacements[node] = new
            elif node.op == "get_attr":
                self._replacements[node] = self._read_attribute(node)
            elif node.op == "call_function":
                self._replacements[node] = self._translate_call(node)
            elif node.op == "output":
                self._finish(node)
        self._graph.eliminate_dead_code()
        for node in self._graph.nodes:
            if node.target in EMPTY_OPS:
                raise NonPointwiseError(
                    f"the core reads memory that it has not written ({called_op(node)}). Use `torch.zeros_like`.",
                    called_op(node),
                    location_of(node),
                )
        self._graph.lint()
        return self._graph

    def _read_attribute(self, node: fx.Node) -> Any:
        value = getattr(self._module, str(node.target))
        if isinstance(value, FakeTensor):
            raise StatefulCoreError(
                "the core keeps a tensor from an earlier call. Return it as a state instead.",
                "constant",
                location_of(next(iter(node.users), node)),
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CaptureError(
                f"the core makes a constant tensor of shape {shape} in every step. Make it once, outside of the core.",
                "constant",
                location_of(next(iter(node.users), node)),
            )
        return _read_scalar(value)

    def _translate_call(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target in FILL_OPS:
            position = FILL_OPS[target]
            value = 0 if position is None else self._replace_argument(node.args[position])
            return _convert_scalar(value, node) if isinstance(value, bool | int | float) else value
        if target is TERMS:
            return self._replace_argument(_skip_conversions(node.args[0]))
        if target in ALIAS_OPS or target in (SUM_OP, UNIFORM):
            return self._replace_argument(node.args[0])
        if target is operator.getitem and node.all_input_nodes[0].target in ALIAS_OPS:
            return self._replace_argument(node.args[0])
        args = fx.node.map_arg(node.args, self._replace_argument)
        kwargs = fx.node.map_arg(node.kwargs, self._replace_argument)
        if target is _prims.where.default and isinstance(args[0], bool):
            return args[1] if args[0] else args[2]
        if target is _prims.bitwise_or.default and _is_certain(args):
            return True
        folded = _fold(node, args, kwargs)
        if folded is not None:
            return folded
        return self._emit(node, _wrap_constants(node, args), kwargs)

    def _replace_argument(self, value: Any) -> Any:
        return self._replacements[value] if isinstance(value, fx.Node) else value

    def _emit(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        key = call_key(node, args, kwargs)
        existing = self._node_by_key.get(key)
        if existing is not None:
            return existing
        name = getattr(node.target, "_opname", None) or node.name
        new = self._graph.create_node("call_function", node.target, args, kwargs, name=name)
        new.meta["val"] = node.meta.get("val")
        new.stack_trace = node.stack_trace
        self._node_by_key[key] = new
        return new

    def _finish(self, node: fx.Node) -> None:
        results = node.args[0]
        entries = results if isinstance(results, list | tuple) else (results,)
        self._graph.output(tuple(self._make_result(entry) for entry in entries))

    def _make_result(self, entry: Any) -> fx.Node | None:
        if entry is None:
            return None
        new = self._replace_argument(entry)
        if isinstance(new, fx.Node):
            return new
        value = entry.meta["val"]
        literal = self._graph.call_function(_prims.scalar_tensor.default, (new,), {"dtype": value.dtype})
        literal.meta["val"] = value
        return literal


def _is_certain(sides: Sequence[Any]) -> bool:
    """True if one condition is `x == x` and the other condition is `x != x`, so that one condition is always true."""
    args_by_op = {side.target: side.args for side in sides if isinstance(side, fx.Node)}
    equal, unequal = args_by_op.get(_prims.eq.default), args_by_op.get(_prims.ne.default)
    return equal is not None and equal == unequal and equal[0] is equal[1]


def _skip_conversions(node: Any) -> Any:
    """The sum of which `node` is a conversion or a view, otherwise `node`.

    The dtype after a conversion may be too narrow for the terms of the sum.
    """
    source = node
    while source.target in ALIAS_OPS or source.target is _prims.convert_element_type.default:
        source = source.args[0]
    return source if source.target is SUM_OP else node


def _fold(node: fx.Node, args: Any, kwargs: Any) -> bool | int | float | None:
    """The value of an op on constants alone, rounded to the op's dtype. `None` if an argument is not a constant."""
    target: Any = node.target
    value = node.meta.get("val")
    if target in EMPTY_OPS or not isinstance(value, Tensor):
        return None
    if any(isinstance(a, fx.Node) for a in pytree.tree_leaves((args, kwargs))):
        return None
    tensors = [
        torch.tensor(new, dtype=old.meta["val"].dtype, device="cpu") if isinstance(old, fx.Node) else new
        for old, new in zip(node.args, args, strict=True)
    ]
    return _read_scalar(target(*tensors, **kwargs))


def _wrap_constants(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wraps constants outside of their dtype's range like conversions in eager mode: 300 becomes 44 in uint8."""
    target: Any = node.target
    tensors = [a for a in args if isinstance(a, fx.Node)]
    # Ops outside of `prims` convert their arguments themselves.
    if facts_of(target) is None or target.namespace != "prims" or not tensors:
        return args
    of_result = node.target is _prims.where.default
    dtype = node.meta["val"].dtype if of_result else tensors[0].meta["val"].dtype
    return tuple(_wrap(a, dtype) if _is_number(a) else a for a in args)


def _wrap(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    if isinstance(value, int) and not isinstance(value, bool) and not dtype.is_floating_point:
        return _read_scalar(torch.tensor(value, dtype=torch.int64, device="cpu").to(dtype))
    if isinstance(value, float) and dtype.is_floating_point and abs(value) > torch.finfo(dtype).max:
        return _read_scalar(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
    return value


def _convert_scalar(value: bool | int | float, node: fx.Node) -> bool | int | float:
    return _read_scalar(torch.tensor(value, dtype=node.meta["val"].dtype, device="cpu"))


def _read_scalar(tensor: Tensor) -> bool | int | float:
    value = tensor.item()
    assert isinstance(value, bool | int | float)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def call_key(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """A key of a call of the function of `node`. Calls with equal keys have equal values."""
    # The dtype is part of the key, because `where(c, 1, 0)` has different values in int32 and int64.
    return node.target, _make_hashable(args), _make_hashable(kwargs), getattr(node.meta["val"], "dtype", None)


def _make_hashable(value: Any) -> Any:
    """A key that distinguishes the constants 1, 1.0 and True, and also 0.0 and -0.0."""
    if isinstance(value, list | tuple):
        return tuple(_make_hashable(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _make_hashable(v)) for k, v in sorted(value.items()))
    if _is_number(value):
        return type(value).__name__, repr(value)
    return value
