"""A step and its VJP with residuals: intermediate values that the forward saves and the VJP does not recompute.

The values to save form a minimum cut through the part of the VJP that depends on the step's arguments alone. The cost
of a value is the number of bytes that are moved for it. An input is only read once more. Any other value is written and
read. Captured tensors cost nothing, because they are the same at all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph.ir._ports import Port, Role, ports
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.lowering._normalize import call_key
from flexsn_graph.traces._step import StepTrace

_prims = torch.ops.prims

_COTANGENTS = (Role.GRAD_OUTPUT, Role.GRAD_STATE)


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """A step and its VJP that share residuals. `keep_residuals` creates them.

    Attributes:
        forward: `[*inputs, *states, *lifted] -> [*outputs, *new_states, *residuals]`.
        vjp: takes `[*inputs, *states, *lifted, *residuals, *cotangents]`, but does not read the states.
        dtypes: dtypes of the residuals.
        traffic: bytes per element and step that are moved for the VJP. The forward writes the residuals, and the VJP
            reads the residuals and inputs.
    """

    forward: StepGraph
    vjp: StepGraph
    dtypes: tuple[torch.dtype, ...]
    traffic: float


def keep_residuals(trace: StepTrace, vjp: StepGraph, *, rounded: bool = True) -> Residuals:
    """Selects the residuals of a step and its VJP, so that the fewest bytes are moved.

    Args:
        vjp: the VJP of the step, from the gradients of all differentiable results.
        rounded: True if float16 and bfloat16 values are rounded after each op. If False, results of ops in these dtypes
            are not residuals, and float32 values that are computed from these results are saved instead.

    Example:
        >>> step = trace_step(lambda x, y, z: (torch.tanh(x + y + z),), 3, 0, 1, (torch.zeros(3),) * 3)
        >>> residuals = keep_residuals(step, step.vjp(step.differentiable, [True] * 3))
        >>> residuals.dtypes, residuals.traffic  # tanh of the sum instead of three inputs
        ((torch.float32,), 8.0)
    """
    size = math.prod(trace.step_shape)
    linear = _find_dependents(vjp, *_COTANGENTS)
    varying = _find_dependents(vjp, Role.INPUT, Role.STATE)
    inputs = {node for port, node in vjp.placeholders.items() if port.role is Role.INPUT}

    def cost(node: fx.Node) -> float:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return math.inf  # an op with several results. Each result has its own node
        if node in inputs:
            return float(value.element_size() * value.numel() / size) if size else 0.0
        if not rounded and node.op == "call_function" and value.dtype in (torch.float16, torch.bfloat16):
            return math.inf
        return 2.0 * float(value.element_size())

    cut = _find_minimum_cut([n for n in vjp.graph.nodes if n in varying and n not in linear], linear, cost)
    residuals = [node for node in cut if node not in inputs]
    return Residuals(
        forward=_add_results(trace.forward, vjp, linear, residuals),
        vjp=_add_arguments(vjp, residuals),
        dtypes=tuple(node.meta["val"].dtype for node in residuals),
        traffic=sum(map(cost, cut)),
    )


def without_cotangents(vjp: StepGraph, absent: Collection[Port]) -> StepGraph:
    """The VJP without the arguments `absent`, which are cotangents that are always zero."""
    linear = _find_dependents(vjp, *_COTANGENTS)
    zero = {node for port, node in vjp.placeholders.items() if port in absent}
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    positions: list[int] = []
    for node in vjp.graph.nodes:
        linear_arguments = [argument for argument in node.all_input_nodes if argument in linear]
        if node in zero:
            continue
        if node.op == "output":
            positions = [i for i, entry in enumerate(vjp.entries) if entry not in zero]
            graph.output(tuple(new[vjp.entries[i]] for i in positions))
        elif linear_arguments and all(argument in zero for argument in linear_arguments):
            zero.add(node)  # linear in its arguments, all of which are zero
        elif any(argument in zero for argument in linear_arguments):
            new[node] = _replace_with_zeros(graph, node, new, zero)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.eliminate_dead_code()
    arguments = tuple(port for port in vjp.arguments if port not in absent)
    return StepGraph(graph, arguments, tuple(vjp.results[i] for i in positions), vjp.layouts)


def _replace_with_zeros(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, Any], zero: Collection[fx.Node]) -> Any:
    """The node that replaces a linear op, some of whose arguments are zero."""
    if node.target is _prims.add.default:
        return next(new[argument] for argument in node.all_input_nodes if argument not in zero)
    if node.target is _prims.sub.default and node.args[1] in zero:
        return new[node.all_input_nodes[0]]
    replacements = {argument: 0.0 if argument in zero else new[argument] for argument in node.all_input_nodes}
    return graph.node_copy(node, replacements.__getitem__)


def _find_dependents(step: StepGraph, *roles: Role) -> set[fx.Node]:
    """The arguments of these roles, and all nodes that are computed from them."""
    results = {node for port, node in step.placeholders.items() if port.role in roles}
    for node in step.graph.nodes:
        if node.op == "call_function" and any(argument in results for argument in node.all_input_nodes):
            results.add(node)
    return results


def _find_minimum_cut(
    nodes: Sequence[fx.Node], users: Collection[fx.Node], cost: Callable[[fx.Node], float]
) -> list[fx.Node]:
    """The cheapest subset of `nodes` from which `users` can be computed. The subset is in the order of `nodes`."""
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    for node in nodes:
        price = cost(node)
        # An edge without the attribute "capacity" has infinite capacity.
        network.add_edge((node, "in"), (node, "out"), **({} if math.isinf(price) else {"capacity": price}))
        if node.op == "placeholder":
            network.add_edge("source", (node, "in"))
        for user in node.users:
            if user in users or user.op == "output":
                network.add_edge((node, "out"), "sink")
            else:
                network.add_edge((node, "out"), (user, "in"))
    _, (reached, _) = networkx.minimum_cut(network, "source", "sink")
    return [node for node in nodes if (node, "in") in reached and (node, "out") not in reached]


def _add_results(
    forward: StepGraph, vjp: StepGraph, linear: Collection[fx.Node], residuals: Sequence[fx.Node]
) -> StepGraph:
    """`forward` with values of `vjp` as additional results. `linear` contains the nodes that depend on cotangents."""
    graph = fx.Graph()
    node_by_key: dict[Any, fx.Node] = {}

    def add(node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The copy of a node, or an equal node that already exists."""
        args = fx.node.map_arg(node.args, new.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, new.__getitem__)
        key = call_key(node, args, kwargs)
        if key not in node_by_key:
            node_by_key[key] = graph.node_copy(node, new.__getitem__)
        return node_by_key[key]

    arguments = {port: graph.node_copy(node) for port, node in forward.placeholders.items()}
    of_forward = {node: arguments[port] for port, node in forward.placeholders.items()}
    of_vjp = {node: arguments[port] for port, node in vjp.placeholders.items() if node not in linear}
    for new, nodes in ((of_forward, forward.graph.nodes), (of_vjp, vjp.graph.nodes)):
        for node in nodes:
            if node.op == "call_function" and node not in linear:
                new[node] = add(node, new)
    results = [of_forward[node] for node in forward.entries]
    graph.output((*results, *(of_vjp[node] for node in residuals)))
    graph.eliminate_dead_code()
    layouts = {**forward.layouts, **vjp.layouts}
    return StepGraph(graph, forward.arguments, (*forward.results, *ports(Role.SAVED, len(residuals))), layouts)


def _add_arguments(vjp: StepGraph, residuals: Sequence[fx.Node]) -> StepGraph:
    """`vjp` with its values `residuals` as additional arguments, which precede the cotangents."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    saved = dict(zip(ports(Role.SAVED, len(residuals)), residuals, strict=True))
    primals = {port: node for port, node in vjp.placeholders.items() if port.role not in _COTANGENTS}
    cotangents = {port: node for port, node in vjp.placeholders.items() if port.role in _COTANGENTS}
    for port, node in {**primals, **saved, **cotangents}.items():
        new[node] = graph.placeholder(port.name)
        new[node].meta["val"] = node.meta["val"]
    for node in vjp.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], new.__getitem__))
        elif node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.eliminate_dead_code()
    return replace(vjp, graph=graph, arguments=(*primals, *saved, *cotangents))
