"""A step and its VJP with residuals: what the VJP needs of the step, kept by the forward, not computed again.

Which values to keep is a minimum cut through the part of the VJP that is computed from the step's arguments alone, in
bytes moved: an input is there anyway and is read once more, anything else is written and read. Captured tensors are
free, since they do not change with the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from flexsn_graph._normalize import call_key
from flexsn_graph._step import StepGraph, StepTrace, StepVjp

_prims = torch.ops.prims


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """A step and its VJP that share residuals, made by `keep_residuals`.

    Attributes:
        forward: `[*inputs, *states, *lifted] -> [*outputs, *new_states, *residuals]`.
        vjp: takes `[*inputs, *states, *lifted, *residuals, *cotangents]`, the residuals named ``saved_0`` and so on,
            and uses no state.
        dtypes: of the residuals.
        traffic: bytes per element and step that are moved for the VJP: residuals, and inputs that it reads, too.
    """

    forward: StepGraph
    vjp: StepVjp
    dtypes: tuple[torch.dtype, ...]
    traffic: float


def keep_residuals(trace: StepTrace, vjp: StepVjp, *, rounded: bool = True) -> Residuals:
    """A step and its VJP with residuals.

    Args:
        vjp: of the step, from the gradients of all results that have one.
        rounded: whether float16 and bfloat16 values are rounded after each op. If they are not, what is computed of
            them is kept instead, which is float32.

    Example:
        >>> step = trace_step(lambda x, y, z: (torch.tanh(x + y + z),), 3, 0, 1, (torch.zeros(3),) * 3)
        >>> kept = keep_residuals(step, step.vjp(step.differentiable, [True] * 3))
        >>> kept.dtypes, kept.traffic  # tanh of the sum instead of three inputs
        ((torch.float32,), 8.0)
    """
    size = math.prod(trace.step_shape)
    linear = _depending_on(vjp.graph, "grad_")
    varying = _depending_on(vjp.graph, "input_", "state_")

    def cost(node: fx.Node) -> float:
        value = node.meta["val"]
        if _is_input(node):
            return float(value.element_size() * value.numel() / size) if size else 0.0
        if not rounded and node.op == "call_function" and value.dtype in (torch.float16, torch.bfloat16):
            return math.inf
        return 2.0 * float(value.element_size())

    cut = _minimum_cut([n for n in vjp.graph.nodes if n in varying and n not in linear], linear, cost)
    kept = [node for node in cut if not _is_input(node)]
    names = {node: f"saved_{i}" for i, node in enumerate(kept)}
    layouts = {**trace.forward.layouts, **vjp.layouts}
    return Residuals(
        forward=StepGraph(_with_results(trace.forward.graph, vjp.graph, linear, kept), layouts),
        vjp=replace(vjp, graph=_with_arguments(vjp.graph, names)),
        dtypes=tuple(node.meta["val"].dtype for node in kept),
        traffic=sum(map(cost, cut)),
    )


def without_cotangents(vjp: StepVjp, absent: Collection[str]) -> StepVjp:
    """A VJP where some cotangents, by name, are zero, and no arguments any more."""
    linear = _depending_on(vjp.graph, "grad_")
    zero = {node for node in vjp.graph.nodes if node.op == "placeholder" and node.target in absent}
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    kept: list[int] = []
    for node in vjp.graph.nodes:
        came = [argument for argument in node.all_input_nodes if argument in linear]
        if node in zero:
            continue
        if node.op == "output":
            entries: Any = node.args[0]
            kept = [i for i, entry in enumerate(entries) if entry not in zero]
            graph.output(tuple(new[entries[i]] for i in kept))
        elif came and all(argument in zero for argument in came):
            zero.add(node)  # linear in its arguments, all of which are zero
        elif any(argument in zero for argument in came):
            new[node] = _beside_zero(graph, node, new, zero)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.eliminate_dead_code()
    gradients = tuple(kept.index(p) if p in kept else None for p in vjp.gradients)
    return StepVjp(graph, vjp.layouts, gradients)


def _beside_zero(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, Any], zero: Collection[fx.Node]) -> Any:
    """What stands for a linear op of which some arguments are zero."""
    if node.target is _prims.add.default:
        return next(new[argument] for argument in node.all_input_nodes if argument not in zero)
    if node.target is _prims.sub.default and node.args[1] in zero:
        return new[node.all_input_nodes[0]]
    stand_ins = {argument: 0.0 if argument in zero else new[argument] for argument in node.all_input_nodes}
    return graph.node_copy(node, stand_ins.__getitem__)


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("input_")


def _depending_on(graph: fx.Graph, *roles: str) -> set[fx.Node]:
    """The arguments whose names begin so, and what is computed of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and str(node.target).startswith(roles)) or (
            node.op == "call_function" and any(argument in found for argument in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _minimum_cut(
    nodes: Sequence[fx.Node], users: Collection[fx.Node], cost: Callable[[fx.Node], float]
) -> list[fx.Node]:
    """The cheapest of `nodes` from which alone `users` can be computed, in order."""
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    for node in nodes:
        price = cost(node)
        # An edge without capacity has an infinite one.
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


def _with_results(
    forward: fx.Graph, vjp: fx.Graph, linear: Collection[fx.Node], kept: Sequence[fx.Node]
) -> fx.Graph:
    """`forward` that returns values of `vjp` as well; `linear`: those that depend on cotangents."""
    graph = fx.Graph()
    seen: dict[Any, fx.Node] = {}
    arguments: dict[str, fx.Node] = {}

    def add(node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The copy of a node: one that is there already if there is one."""
        args = fx.node.map_arg(node.args, new.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, new.__getitem__)
        key = call_key(node, args, kwargs)
        if key not in seen:
            seen[key] = graph.node_copy(node, new.__getitem__)
        return seen[key]

    of_forward: dict[fx.Node, fx.Node] = {}
    results: Any = ()
    for node in forward.nodes:
        if node.op == "placeholder":
            of_forward[node] = arguments[str(node.target)] = graph.node_copy(node)
        elif node.op == "output":
            results = fx.node.map_arg(node.args[0], of_forward.__getitem__)
        else:
            of_forward[node] = add(node, of_forward)
    of_vjp: dict[fx.Node, fx.Node] = {}
    for node in vjp.nodes:
        if node.op == "placeholder" and node not in linear:
            of_vjp[node] = arguments[str(node.target)]
        elif node.op == "call_function" and node not in linear:
            of_vjp[node] = add(node, of_vjp)
    graph.output((*results, *(of_vjp[node] for node in kept)))
    graph.eliminate_dead_code()
    return graph


def _with_arguments(vjp: fx.Graph, names: Mapping[fx.Node, str]) -> fx.Graph:
    """`vjp` that takes values of its own as arguments, before the cotangents."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in vjp.nodes if node.op == "placeholder"]
    for node in placeholders:
        if not str(node.target).startswith("grad_"):
            new[node] = graph.node_copy(node)
    for node, name in names.items():
        new[node] = graph.placeholder(name)
        new[node].meta["val"] = node.meta["val"]
    for node in vjp.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], new.__getitem__))
        elif node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.eliminate_dead_code()
    return graph
