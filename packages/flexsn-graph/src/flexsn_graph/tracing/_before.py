"""Records a core's computations on captured tensors alone, and their gradients, as graphs that run outside the loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph._torch_private import FakeTensor, reachable_nodes, record
from flexsn_graph.errors import StatefulCoreError, UnsupportedCoreError
from flexsn_graph.ir._ops import VIEW_OPS
from flexsn_graph.lowering._decompositions import DURING_RECORDING, MISSING_IN_TORCH
from flexsn_graph.lowering._lowering import lower
from flexsn_graph.tracing._prologue import ComputedBefore

if TYPE_CHECKING:
    from flexsn_graph.tracing._tracer import Tracer

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def compute_before(tracer: Tracer) -> tuple[set[int], ComputedBefore]:
    """The numbers of the needed captured tensors, and graphs that compute all other lifted values from these tensors.

    The graphs take only the needed tensors as arguments, in the order of `tracer.captures.tensors`.
    """
    captures = tracer.captures
    captured = list(captures.tensors)
    trained = [i for i, number in enumerate(captured) if captures.tensors[number].requires_grad]
    stand_ins = [captures.stand_ins[number] for number in captured]
    first = len(tracer.examples)
    gradients: list[tuple[int, ...]] = []
    custom: list[bool] = []
    refusals: dict[int, UnsupportedCoreError] = {}

    def forward(*arguments: Tensor) -> list[Tensor]:
        values, _ = tracer.compute(arguments[:first])
        return [value.detach() for value in values]

    def backward(*arguments: Tensor) -> list[Tensor]:
        values, calls = tracer.compute(arguments[:first])
        results: list[Tensor] = []
        for value, gradient in zip(values, arguments[first + len(captured) :], strict=True):
            try:
                result = tracer.gradients_of(value, gradient, calls)
            except UnsupportedCoreError as error:  # raised when a gradient is required, so not for inference
                refusals[len(gradients)] = error
                result = [None] * len(trained)
            gradients.append(tuple(i for i, g in zip(trained, result, strict=True) if g is not None))
            custom.append(_has_custom_function(value.grad_fn))
            results += [g for g in result if g is not None]
        return results

    primals = [*tracer.examples, *stand_ins]
    values = [captures.stand_ins[number] for number in tracer.computed]
    forward_graph = _functionalize(record(forward, primals, tracer.mode, DURING_RECORDING), tracer)
    joint = _functionalize(record(backward, [*primals, *values], tracer.mode, DURING_RECORDING), tracer)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    parts: list[fx.Graph | None] = []
    start = 0
    for i, targets in enumerate(gradients):
        own_results = range(start, start + len(targets))
        start += len(targets)
        part = _restrict(joint.graph, own_results) if targets else None
        parts.append(part)
        if part is not None and custom[i]:
            nonlinear = _find_nonlinear(part, position=first + len(captured) + i)
            if nonlinear is not None:
                refusals[i] = nonlinear
    graphs = [forward_graph.graph, *(part for part in parts if part is not None)]
    needed = [i for i in range(len(captured)) if any(_list_placeholders(graph)[first + i].users for graph in graphs)]
    lifted = [i for i, number in enumerate(captured) if number in tracer.lifted]
    # A custom function can also return gradients of tensors that the function does not read.
    used = sorted({*needed, *lifted, *(i for targets in gradients for i in targets)})
    assert len(placeholders) == first + len(captured) + len(values)
    backward_graphs = [
        None
        if part is None
        else _select_arguments(joint, part, [*(first + i for i in used), first + len(captured) + i])
        for i, part in enumerate(parts)
    ]
    calls = [captures.call_of(number) for number in tracer.computed]
    return {captured[i] for i in used}, ComputedBefore(
        _select_arguments(forward_graph, forward_graph.graph, [first + i for i in used]),
        tuple(backward_graphs),
        tuple(tuple(used.index(i) for i in targets) for targets in gradients),
        next(call for call in calls if call is not None),
        values[0].device,
        refusals,
    )


def _functionalize(recorded: fx.GraphModule, tracer: Tracer) -> fx.GraphModule:
    """Removes mutations, copies, and nodes on which no result depends."""
    functional = lower(recorded, tracer.mode, MISSING_IN_TORCH)
    for node in functional.graph.nodes:
        if node.target in _COPIES and not node.kwargs:
            node.replace_all_uses_with(node.args[0])  # no node of a functional graph writes to a value
    functional.graph.eliminate_dead_code()
    for node in functional.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(functional, str(node.target)), FakeTensor):
            raise StatefulCoreError(
                "the core keeps a tensor from an earlier call. Return it as a state instead.",
                "constant",
                location_of(next(iter(node.users), node)),
            )
    return functional


def _list_placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _restrict(graph: fx.Graph, results: Collection[int]) -> fx.Graph:
    """A copy of the graph that returns only some of the results."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            copy.output([new[node.args[0][i]] for i in results])
        else:
            new[node] = copy.node_copy(node, new.__getitem__)
    copy.eliminate_dead_code()
    return copy


def _select_arguments(module: fx.GraphModule, graph: fx.Graph, positions: Sequence[int]) -> fx.GraphModule:
    """A module that takes only the graph's arguments at `positions`, in this order. All other arguments are unused."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    arguments = _list_placeholders(graph)
    for position in positions:
        new[arguments[position]] = copy.node_copy(arguments[position])
    for node in graph.nodes:
        if node.op == "placeholder":
            assert node in new or not node.users, "the graph depends on an argument of the step"
        elif node.op == "output":
            copy.output(fx.node.map_arg(node.args[0], new.__getitem__))
        else:
            new[node] = copy.node_copy(node, new.__getitem__)
    return fx.GraphModule(module, copy)


# -- custom functions --------------------------------------------------------------------------------------


def _has_custom_function(node: Any) -> bool:
    return any(isinstance(reached, torch.autograd.function.BackwardCFunction) for reached, _ in reachable_nodes([node]))


_LINEAR = """
    neg clone _to_copy sum mean flip roll cumsum cat stack constant_pad_nd repeat _unsafe_view alias expand_copy
    select_scatter slice_scatter as_strided index_add index_select gather index detach copy
"""
_LINEAR_OPS = frozenset(_LINEAR.split())


def _find_nonlinear(graph: fx.Graph, position: int) -> UnsupportedCoreError | None:
    """The error for a gradient that is not a linear function of the incoming gradient, or `None`.

    If a custom function runs in the loop, its backward receives the gradient of each step. If the function runs before
    the loop, its backward receives the sum of these gradients. If the backward is linear, the result for the sum equals
    the sum of the results for all steps. Torch's own formulas are linear.
    """
    linear = {_list_placeholders(graph)[position]}
    for node in graph.nodes:
        if _is_zero(node):
            linear.add(node)
        if node.op == "output":
            constant = [result for result in node.args[0] if result not in linear]
            return _nonlinear_error(constant[0]) if constant else None
        linear_arguments = [argument for argument in node.all_input_nodes if argument in linear]
        if node.op != "call_function" or not linear_arguments:
            continue
        if not _is_linear(node, linear):
            return _nonlinear_error(node)
        linear.add(node)
    return None


def _nonlinear_error(node: fx.Node) -> UnsupportedCoreError:
    return UnsupportedCoreError(
        f"the backward of an autograd.Function on captured tensors alone is not linear in its gradient "
        f"({called_op(node)}): the loop calls the backward with each step's gradient, but kernels call it "
        "with the sum of these gradients. Apply the function outside of the core.",
        called_op(node),
        location_of(node),
    )


def _is_linear(node: fx.Node, linear: Collection[fx.Node]) -> bool:
    target: Any = node.target
    name = getattr(target, "_opname", getattr(target, "__name__", ""))
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    count = sum(a in linear for a in operands)
    if name in ("mul", "mm", "bmm", "mv", "dot"):
        return count == 1
    if name == "div":
        return count == 1 and node.args[0] in linear
    if name in ("add", "sub"):
        return all(_vanishes(a, linear) for a in node.args)
    if name == "where":
        return node.args[0] not in linear and all(_vanishes(a, linear) for a in node.args[1:])
    if name == "masked_fill":
        return node.args[1] not in linear and _vanishes(node.args[2], linear)
    return target in VIEW_OPS or name in _LINEAR_OPS or name == "getitem" or "backward" in name


def _vanishes(value: Any, linear: Collection[fx.Node]) -> bool:
    """True if the value is zero, or linear in the incoming gradient."""
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    return value in linear


def _is_zero(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name in ("zeros", "zeros_like", "new_zeros") or (
        name in ("full", "full_like", "new_full", "scalar_tensor") and any(a == 0 for a in node.args)
    )
