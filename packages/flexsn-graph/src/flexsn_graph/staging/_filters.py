"""Expresses the gradient of a filter over past steps as a filter over later steps.

If a state is shifted by several steps, its gradient passes through these steps. Each step adds a term to the gradient:
a product that this step computes, times a weight that is the same at all steps. Therefore, the gradient at the end is a
function of the products of later steps. The backward has already computed these products, so it does not have to carry
the gradients in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.passes._linearity import is_linear
from flexsn_graph.staging._staged_step import Phase, Product, Stage, StagedStep, View


def without_carried_filters(vjp: StagedStep, unneeded: Collection[Port]) -> StagedStep:
    """Replaces gradients of shifted states, which pass from step to step, with products of later steps.

    Args:
        vjp: the VJP of a step.
        unneeded: gradients of states that are absent at the last step and that are not needed before the first step.

    Returns:
        The new VJP, or `vjp` itself if it has no such gradients.
    """
    chains: dict[Port, dict[int, Port]] = {}
    for state, (source, steps) in vjp.shifts.items():
        chains.setdefault(source, {})[steps] = Port(Role.GRAD_STATE, state.index)
    for source, carried in chains.items():
        chain = [Port(Role.GRAD_STATE, source.index), *(carried[steps] for steps in sorted(carried))]
        if all(port in unneeded for port in chain[1:]):
            vjp = _drop_gradients(vjp, chain)
    return vjp


def _drop_gradients(vjp: StagedStep, chain: Sequence[Port]) -> StagedStep:
    """The VJP without all gradients of a chain except the first, if one stage computes the chain from one product."""
    removed = frozenset(chain[1:])
    products = {p.result.source for p in vjp.parts if isinstance(p, Product) and p.phase is Phase.LOOP}
    for number, stage in enumerate(vjp.parts):
        if isinstance(stage, Stage) and stage.phase is Phase.LOOP and removed <= {view.source for view in stage.writes}:
            read = {view.source for part in vjp.parts if part is not stage for view in part.reads}
            unrolled = None if read & removed else _unroll(stage, chain, products, len(vjp.later))
            if unrolled is None:
                return vjp
            unrolled_stage, product, later = unrolled
            values = {port: value for port, value in vjp.values.items() if port not in removed}
            values |= dict.fromkeys(later, vjp.values[product])
            return replace(
                vjp,
                arguments=tuple(port for port in vjp.arguments if port not in removed),
                results=tuple(port for port in vjp.results if port not in removed),
                parts=(*vjp.parts[:number], unrolled_stage, *vjp.parts[number + 1 :]),
                values=values,
                later={**vjp.later, **{port: (product, steps) for steps, port in enumerate(later, 1)}},
            )
    return vjp


def _unroll(
    stage: Stage, chain: Sequence[Port], products: Collection[Port], first: int
) -> tuple[Stage, Port, list[Port]] | None:
    """Computes the first gradient of a chain in one stage, from the product at this step and at later steps.

    Args:
        first: number of the first port for a later value of the product.

    Returns:
        The new stage, the product, and the ports of the product's values at later steps, the next step first. `None` if
        a gradient of the chain is not a linear function of the next gradient of the chain and of one product.
    """
    graph = stage.graph
    reads = {n: stage.reads[p.index] for p, n in graph.placeholders.items() if p.role is Role.INPUT}
    entries = dict(zip((view.source for view in stage.writes), graph.entries, strict=True))
    carried_nodes = {
        port: {n for n, view in reads.items() if view == _replace_source(view, port)} for port in chain[1:]
    }
    sources = set[fx.Node]()
    for port, following in zip(chain, [*chain[1:], None], strict=True):
        if not isinstance(entries.get(port), fx.Node):
            return None
        moving = {n for n in _find_ancestors([entries[port]]) if n in reads}
        sources |= moving - (carried_nodes[following] if following is not None else set())
    other_entries = [entry for entry, view in zip(graph.entries, stage.writes, strict=True) if view.source not in chain]
    if len(sources) != 1 or not _find_ancestors(other_entries).isdisjoint(set().union(*carried_nodes.values())):
        return None
    (source,) = sources
    product = reads[source].source
    if (
        reads[source].calls
        or product not in products
        or not _is_linear(stage, chain, {source, *set().union(*carried_nodes.values())})
    ):
        return None
    later = [Port(Role.LATER, first + i) for i in range(len(chain) - 1)]
    return _rewrite(stage, chain, entries, other_entries, reads, carried_nodes, source, later), product, later


def _replace_source(view: View, port: Port) -> View:
    return replace(view, source=port, calls=())


def _find_ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """The nodes themselves, and the nodes on which they depend."""
    result, waiting = set[fx.Node](), [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in result:
            result.add(node)
            waiting += node.all_input_nodes
    return result


def _is_linear(stage: Stage, chain: Collection[Port], moving: Collection[fx.Node]) -> bool:
    """True if the gradients of a chain are linear functions of the arguments `moving`, without a constant term."""
    graph, positions = fx.Graph(), [i for i, view in enumerate(stage.writes) if view.source in chain]
    entries = [stage.graph.entries[i] for i in positions]
    needed, new = _find_ancestors(entries), dict[fx.Node, fx.Node]()
    arguments: list[Port] = []
    for port, node in stage.graph.placeholders.items():
        new[node] = graph.node_copy(node)
        arguments.append(Port(Role.GRAD_OUTPUT, len(arguments)) if node in moving else port)
    for node in stage.graph.graph.nodes:
        if node.op == "call_function" and node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in entries))
    results = tuple(stage.graph.results[i] for i in positions)
    return is_linear(StepGraph(graph, tuple(arguments), results, stage.graph.layouts), {Role.GRAD_OUTPUT})


def _rewrite(
    stage: Stage,
    chain: Sequence[Port],
    entries: Mapping[Port, Any],
    other_entries: Sequence[Any],
    reads: Mapping[fx.Node, View],
    carried_nodes: Mapping[Port, Collection[fx.Node]],
    source: fx.Node,
    later: Sequence[Port],
) -> Stage:
    steps = [_find_ancestors([entries[port]]) for port in chain]
    removed = set().union(*carried_nodes.values())
    needed = _find_ancestors(other_entries) | (set().union(*steps) - removed)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    arguments: list[Port] = []
    views: list[View] = []
    for port, node in stage.graph.placeholders.items():
        if node in needed:
            new[node] = graph.node_copy(node)
            arguments.append(Port(Role.INPUT, len(views)) if node in reads else port)
            views += [reads[node]] if node in reads else []
    product_nodes = [new[source]]
    for port in later:
        product_nodes.append(graph.placeholder(port.name))
        product_nodes[-1].meta["val"] = source.meta["val"]
        arguments.append(Port(Role.INPUT, len(views)))
        views.append(_replace_source(reads[source], port))

    def copy(nodes: Collection[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
        for node in stage.graph.graph.nodes:
            if node.op == "call_function" and node in nodes and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)

    moving = {source, *removed}
    for node in stage.graph.graph.nodes:  # adds the nodes that differ between the steps of the chain
        if not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
    copy(needed - moving, new)
    total: fx.Node | None = None
    for step in reversed(range(len(chain))):
        copies = {**new, source: product_nodes[step]}
        if total is not None:
            copies |= dict.fromkeys(carried_nodes[chain[step + 1]], total)
        copy(steps[step], copies)
        total = copies[entries[chain[step]]]
    copy(_find_ancestors(other_entries), new)
    writes = [view for view in stage.writes if view.source not in chain[1:]]
    outputs = [
        total if v.source == chain[0] else new[e]
        for v, e in zip(stage.writes, stage.graph.entries, strict=True)
        if v in writes
    ]
    graph.output(tuple(outputs))
    results = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
    used = {port.index for port in arguments if port.role is Role.LIFTED}
    layouts = {i: layout for i, layout in stage.graph.layouts.items() if i in used}
    step_graph = StepGraph(graph, tuple(arguments), results, layouts)
    return replace(stage, graph=step_graph, reads=tuple(views), writes=tuple(writes))
