"""From a function of single elements, written on tensors, to the graph that a kernel is generated from.

The function is recorded on stand-ins without data. All have one shape, the arguments of no dimension
excepted (they promote by other rules), so whatever is not element by element shows as a change of shape.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from flexsn_codegen._core import CoreSource, emit_core, location_text
from flexsn_codegen._torch_private import (
    TORCH_FOLDER,
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    lower,
    record,
    set_stack_trace,
    undisturbed,
)
from flexsn_codegen.errors import TraceError, UnsupportedOpError

Function = Callable[..., Any]

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
# `(op, position of the value)`: filled with one value, whatever their tensor argument holds.
_FILL_OPS: dict[Any, int] = {
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
    _prims.full.default: 1,
    _prims.full_like.default: 1,
    _prims.fill.default: 1,
    _prims.scalar_tensor.default: 0,
}
_EMPTY_OPS = {_aten.empty.memory_format, _prims.empty_strided.default, _prims.empty_permuted.default}
# The gradient of an argument without dimensions is a sum over the elements. Each element's term is
# computed as if it were the sum, which is right as long as everything after it is linear in it.
_SUM_OPS = {_prims.sum.default}
_LINEAR_OPS = {_prims.convert_element_type.default, _prims.neg.default}

# Two shapes: where the result depends on the sizes, the two graphs differ.
_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23), (10007, 10009, 10037, 29, 31, 37, 41, 43))
MAX_DIMENSIONS = len(_SIZES[0])


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """What a kernel depends on, of an argument.

    Attributes:
        dtype: of its elements.
        scalar: it has no dimensions, and others have some.
        requires_grad: autograd follows what is computed from it.
    """

    dtype: torch.dtype
    scalar: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as the source of its core.

    Attributes:
        graph: `[*arguments] -> [*results]`, on prims and numbers.
        core: takes the arguments that it uses, named ``input_0`` and so on.
        dtypes: of the results.
        differentiable: for each result, whether a gradient can flow through it.
        single: the function returns a tensor, not a tuple of tensors.
    """

    graph: fx.Graph
    core: CoreSource
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    single: bool


def trace(fn: Function, arguments: Sequence[ArgumentType], dimensions: int, device: torch.device, name: str) -> Traced:
    """`fn` for one kind of arguments.

    Raises:
        TraceError: `fn` does not return tensors of its arguments' common shape, captures a tensor, or
            computes with sizes.
        UnsupportedOpError: an op has no rule.
    """
    with undisturbed():
        first, second = (_trace(fn, arguments, sizes[:dimensions], device, name) for sizes in _SIZES)
    if first.core.name != second.core.name:
        raise TraceError(
            f"{name} computes something else for other sizes of its arguments (it reads a shape). "
            "Pass what it computes from them as an argument."
        )
    return first


def gradient_of(
    fn: Function, arguments: Sequence[ArgumentType], differentiable: Sequence[bool], wanted: Sequence[bool]
) -> Function:
    """The function `(*arguments, *gradients of the differentiable results) -> (*wanted gradients)`.

    It computes the results again instead of keeping them.
    """

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [v.detach().requires_grad_(want) for v, want in zip(values[: len(arguments)], wanted, strict=True)]
            cotangents = values[len(arguments) :]
            shape = cotangents[0].shape
            results = _as_tuple(fn(*leaves))
            roots = [r.expand(shape) for r, there in zip(results, differentiable, strict=True) if there]
            asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
            found = torch.autograd.grad(roots, asked, cotangents, allow_unused=True)
        return tuple(
            (torch.zeros_like(leaf) if g is None else g).expand(shape) for g, leaf in zip(found, asked, strict=True)
        )

    return gradient


def _trace(
    fn: Function, arguments: Sequence[ArgumentType], sizes: Sequence[int], device: torch.device, name: str
) -> Traced:
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        stand_ins = [torch.empty(() if a.scalar else sizes, dtype=a.dtype, device=device) for a in arguments]
    differentiable: list[bool] = []
    single = False

    def run(*values: Tensor) -> list[Tensor]:
        nonlocal single
        leaves = [v.clone().requires_grad_(a.requires_grad) for v, a in zip(values, arguments, strict=True)]
        versions = [leaf._version for leaf in leaves]
        with torch.enable_grad(), _Locations():  # type: ignore[no-untyped-call]
            returned = fn(*leaves)
        if versions != [leaf._version for leaf in leaves]:
            raise TraceError(f"{name} changes its argument in place. Return the new value instead.")
        single = isinstance(returned, Tensor)
        results = _as_tuple(returned)
        for result in results:
            if not isinstance(result, Tensor) or tuple(result.shape) not in (tuple(sizes), ()):
                raise TraceError(
                    f"{name} returned {_described(result)} for arguments of shape {list(sizes)}: each result "
                    "is a tensor of the arguments' common shape, computed element by element."
                )
        differentiable.extend(r.requires_grad for r in results)
        return [r.detach() for r in results]

    try:
        recorded = record(run, stand_ins, mode)
        lowered = lower(recorded, stand_ins, mode)
    except AssertionError as error:
        if "Please convert all Tensors" not in str(error):
            raise
        raise TraceError(
            f"{name} captures a tensor (a closure, a global or a module's parameter), which would be frozen "
            "in the kernel. Pass it as an argument."
        ) from None
    except DataDependentOutputException as error:
        raise TraceError(
            f"{name} needs the value of a tensor while it is traced ({error.func}): `.item()`, or an `if` or "
            "loop on it. Use torch.where."
        ) from None
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise TraceError(f"{name} changes its argument in place. Return the new value instead.") from None
    _refuse_complex(recorded.graph)
    graph = _Cleaner(lowered, name).run()
    core = emit_core(graph, name, prune=True)
    results = [n.meta["val"] for n in _output(graph)]
    return Traced(graph, core, tuple(r.dtype for r in results), tuple(differentiable), single)


def _refuse_complex(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            raise UnsupportedOpError(
                f"{node.target} returns {value.dtype}: Triton has no complex numbers{location_text(node)}",
                str(node.target),
            )


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(type(value).__name__)


def _output(graph: fx.Graph) -> Sequence[fx.Node]:
    results: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return cast(Sequence[fx.Node], results)


class _Locations(TorchDispatchMode):
    """Notes for each op the line that called it: the innermost one that is not torch's or ours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        set_stack_trace(_user_line())
        return func(*args, **(kwargs or {}))


_OURS = str(Path(__file__).parent)


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            break  # an op that autograd calls: beyond is the caller of the kernel
        if not file.startswith((TORCH_FOLDER, "<")):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f'  File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {code}\n'
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Cleaner:
    """Leaves pointwise ops on arguments and numbers: no aliases, no fills, no constant expressions."""

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
            value = self._argument(node.args[_FILL_OPS[target]])
            if isinstance(value, fx.Node):
                return value
            return _number(torch.tensor(value, dtype=node.meta["val"].dtype, device="cpu"))
        if target in _ALIAS_OPS:
            return self._alias(node)
        if target in _SUM_OPS:
            return self._sum(node)
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
        if source in self._sums:
            self._sums.add(node)
        return self._argument(source)

    def _sum(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
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
        linear = (
            target in _LINEAR_OPS
            or (target in {_prims.add.default, _prims.sub.default} and all(sums))
            or (target is _prims.mul.default and not all(sums))
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
        arguments = fx.node.map_arg(node.args, self._argument)
        name = "item" if target is operator.getitem else getattr(target, "_opname", None)
        new = self._graph.create_node("call_function", target, arguments, dict(node.kwargs), name=name)
        new.meta["val"] = node.meta.get("val")
        new.stack_trace = node.stack_trace
        return new

    def _argument(self, value: Any) -> Any:
        return self._new[value] if isinstance(value, fx.Node) else value

    def _result(self, entry: fx.Node) -> fx.Node:
        new = self._argument(entry)
        if isinstance(new, fx.Node):
            return new
        value = entry.meta["val"]
        literal = self._graph.call_function(_prims.scalar_tensor.default, (new,), {"dtype": value.dtype})
        literal.meta["val"] = value
        return literal


def _inside_function(node: fx.Node) -> bool:
    """Whether the user's function called the op; autograd's own ops have no line."""
    return bool(location_text(node))


def _number(tensor: Tensor) -> bool | int | float:
    value = tensor.item()
    assert isinstance(value, bool | int | float)
    return value
