"""Splits a step with matrix products into pointwise stages, one kernel each, and the products between them.

The graph of a step is lowered to pointwise ops, views, and products with matrices that are computed from captured
tensors alone. A pointwise value that a product reads is called an operand, and a stage writes it. A stage reads
arguments of the step and products, possibly through views (such as a quarter of the columns, for a gate of an LSTM). A
stage also reads values that are assembled from pieces, and views that move elements. Stages exchange no other values,
so each stage recomputes the intermediate values that it needs.

A product belongs to the loop over time if it depends on the state before the step, and if the state after the step
depends on the product. A product that depends on inputs alone is computed before the loop, for all steps at once. A
product that no later step needs (the readout of a layer) is computed after the loop, also for all steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph.errors import NonPointwiseError
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.ir._ops import is_zero
from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._products import (
    ASSEMBLIES,
    PRODUCTS,
    REDUCTIONS,
    call_of,
    reduced_dims,
    reduces,
    replay,
)
from flexsn_graph.ir._step_graph import StepGraph
from flexsn_graph.lowering._normalize import normalize
from flexsn_graph.staging._convolutions import take_apart
from flexsn_graph.staging._copies import drop_copies
from flexsn_graph.staging._keys import Keys
from flexsn_graph.staging._order import Order
from flexsn_graph.staging._places import Places
from flexsn_graph.staging._staged_step import Phase, Product, Stage, StagedStep, View
from flexsn_graph.staging._sums import copy_last_sums, sum_last
from flexsn_graph.staging._terms import SumsOverTime
from flexsn_graph.staging._views import before_sums, differs, pieces_of, reaches, unsummed_shape, whole_view
from flexsn_graph.tracing._positions import check_positions

_aten = torch.ops.aten
_prims = torch.ops.prims


def has_products(graph: fx.Graph, arguments: Sequence[Port]) -> bool:
    """True if a lowered graph multiplies a value of the step by a matrix, or reduces a value."""
    moving: set[fx.Node] = set()
    ports = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(ports).role is not Role.LIFTED:
                moving.add(node)
        elif not moving.isdisjoint(node.all_input_nodes):
            if node.target in PRODUCTS or reduces(node):
                return True
            moving.add(node)
    return False


def stage(
    module: fx.GraphModule,
    arguments: Sequence[Port],
    results: Sequence[Port],
    *,
    carried: Role,
    keys: Keys,
    existing: Mapping[int, Port] | None = None,
) -> tuple[StagedStep, dict[int, Port]]:
    """Splits a lowered graph into stages and products.

    Args:
        module: the lowered graph, with products and views.
        arguments: ports of its placeholders.
        results: ports of its output's entries.
        carried: role of the values that are carried from step to step: `STATE` in the forward, `GRAD_STATE` in a VJP.
        keys: assigns numbers to nodes. The forward and the VJPs of a step share this object.
        existing: for a VJP, the ports of operands and products of the forward, by the number in `keys`.

    Returns:
        The step, and the ports of its operands and products by the number in `keys`.

    Raises:
        NonPointwiseError: an op mixes elements of the step, and is neither a convolution nor a product or reduction
            along the last dimension.
    """
    return _Staging(module, tuple(arguments), tuple(results), carried, keys, existing or {}).run()


@dataclass(slots=True)
class _Group:
    """A stage under construction."""

    results: list[tuple[fx.Node, View]] = field(default_factory=list)


class _Staging:
    def __init__(
        self,
        module: fx.GraphModule,
        arguments: tuple[Port, ...],
        results: tuple[Port, ...],
        carried: Role,
        keys: Keys,
        existing: Mapping[int, Port],
    ) -> None:
        self._module = module
        self._graph = graph = module.graph
        drop_copies(graph)
        take_apart(graph)
        if carried is Role.GRAD_STATE:
            sum_last(graph, arguments, results)
            copy_last_sums(graph, results)
        self._arguments, self._results = arguments, results
        self._role = carried
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._entries: list[fx.Node] = list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])
        self._keys = keys.of(graph, arguments)
        self._places = places = Places(graph, arguments, carried, self._keys, existing)
        self._matrices: dict[fx.Node, Port] = {}
        self._order: Order
        self._groups: dict[tuple[Phase, int, tuple[int, ...]], _Group] = {}
        self._slots: dict[tuple[Phase, int], list[fx.Node]] = {}
        self._direct_views: dict[fx.Node, View] = {}
        self._terms = SumsOverTime(places.ports, places.moving, places.view, self._build_argument)

    def run(self) -> tuple[StagedStep, dict[int, Port]]:
        finals, leaves = self._split_results()
        shifts = self._find_shifts(finals)
        finals = [(node, port) for node, port in finals if port not in shifts]
        needed = self._places.reaching([n for n, _ in finals] + leaves)
        to_carried = self._places.reaching([n for n, port in finals if port.role is self._role])
        order = [n for n in self._graph.nodes if n in needed]
        # If an input broadcasts, the sums at the end of its gradient are computed after the loop, so `inner` excludes
        # these sums.
        inner = self._places.reaching([before_sums(n) if p.role is Role.GRAD_INPUT else n for n, p in finals] + leaves)
        for node in order:
            if node not in self._places.moving or node in self._places.ports:
                continue
            if node.target in PRODUCTS:
                self._check_product(node)
                self._places.store(node, Role.PRODUCT)
            elif node in inner and self._is_reduction(node):
                self._places.store(node, Role.PRODUCT)
        self._places.find_rows(self._graph)
        for node in order:
            self._places.store_operands(node)
        for leaf in leaves:
            self._places.store_root(leaf)
        self._order = Order(self._places, order, to_carried, [self._places.root(leaf)[0] for leaf in leaves])
        self._place_operands(order, needed)
        self._place_finals(finals)
        parts = self._list_parts(order)
        values = self._list_values()
        staged = StagedStep(
            self._arguments,
            self._results,
            tuple(parts),
            values,
            frozenset(self._places.assembled),
            self._build_matrix_graph(),
            len(self._matrices),
            tuple(self._places.saved),
            tuple(self._terms.list_terms()),
            shifts=shifts,
        )
        computed = (Role.OPERAND, Role.PRODUCT)
        port_by_key = {
            self._keys[n]: port
            for n, port in self._places.ports.items()
            if port.role in computed and n not in self._direct_views
        }
        return staged, port_by_key

    # -- results ---------------------------------------------------------------------------------------------

    def _split_results(self) -> tuple[list[tuple[fx.Node, Port]], list[fx.Node]]:
        """The results that parts write, and the values whose sums over time are gradients of lifted tensors."""
        finals: list[tuple[fx.Node, Port]] = []
        leaves: list[fx.Node] = []
        for node, port in zip(self._entries, self._results, strict=True):
            if port.role is Role.GRAD_LIFTED:
                leaves += self._terms.add(port.index, node)
            else:
                finals.append((node, port))
        return finals, leaves

    def _find_shifts(self, finals: Sequence[tuple[fx.Node, Port]]) -> dict[Port, tuple[Port, int]]:
        """The states whose new value is the previous value of another state.

        This value is already in memory, so no part has to write it.
        """
        if self._role is not Role.STATE:
            return {}
        before = {
            port: self._places.ports[node]
            for node, port in finals
            if port.role is Role.STATE and self._places.role(node) is Role.STATE
        }
        nodes = dict(zip(self._arguments, self._placeholders, strict=True))
        results: dict[Port, tuple[Port, int]] = {}
        # The search starts at states that parts write. It never reaches states that swap places or keep their value.
        latest = [port for port in dict.fromkeys(before.values()) if port not in before]
        while latest:
            port = latest.pop()
            # At most one state can follow a state, because two followers would have different initial values.
            following = next((p for p, source in before.items() if source == port), None)
            if following is not None and not differs(nodes[following], nodes[port]):
                source, steps = results.get(port, (port, 0))
                results[following] = source, steps + 1
                latest.append(following)
        return results

    def _check_product(self, node: fx.Node) -> None:
        target: Any = node.target
        facts = PRODUCTS[target]
        moving = [i for i, position in enumerate(facts.factors) if node.args[position] in self._places.moving]
        if len(moving) == 1 and facts.contracted is None:
            return
        if len(moving) != 1 and facts.contracted is None:
            raise NonPointwiseError(
                f"{called_op(node)} convolves with a weight that depends on the step: in a step, the weight of a "
                "convolution has to be computed from captured tensors alone.",
                called_op(node),
                location_of(node),
            )
        if len(moving) != 1 or facts.contracted is None:
            operands = "two values of the step by each other" if moving else "captured tensors by each other"
            raise NonPointwiseError(
                f"{called_op(node)} multiplies {operands}: exactly one factor of a product in a step has to be "
                "computed from captured tensors alone. For element-by-element products, write `*`.",
                called_op(node),
                location_of(node),
            )
        (side,) = moving
        factor = node.args[facts.factors[side]]
        assert isinstance(factor, fx.Node)
        root, views = self._places.root(factor)
        shape = tuple(root.meta["val"].shape)
        operand_view: Tensor = replay([call_of(v) for v in views], torch.empty(shape, device="meta"))
        dim = facts.contracted[side]
        last = shape[-1] if shape else 1
        if operand_view.shape[dim] > 1 and operand_view.stride(dim) * (operand_view.shape[dim] - 1) >= last:
            raise NonPointwiseError(
                f"{called_op(node)} sums over a dimension of its operand, {list(shape)}, that is not the last one: a "
                "product in a step sums over the step's last dimension. Move the dimension to the end, outside of the "
                "core.",
                called_op(node),
                location_of(node),
            )

    def _is_reduction(self, node: fx.Node) -> bool:
        """True if a node reduces rows. Refuses reductions of other dimensions of a step."""
        if not reduces(node) or is_zero(node.all_input_nodes[0]):
            return False
        if set(reduced_dims(node)) <= {node.all_input_nodes[0].meta["val"].dim() - 1}:
            return True
        if self._role is Role.GRAD_STATE:
            return False  # a stage refuses the reduction, unless it is a sum at the end of a gradient
        shape = list(node.all_input_nodes[0].meta["val"].shape)
        raise NonPointwiseError(
            f"{called_op(node)} reduces dimensions {list(reduced_dims(node))} of {shape}: a step may only reduce its "
            "values over its last dimension (dim=-1), the neurons of a row. Do this outside of the core, or move the "
            "dimension to the end there.",
            called_op(node),
            location_of(node),
        )

    # -- stages ----------------------------------------------------------------------------------------------

    def _get_group(self, phase: Phase, level: int, shape: Sequence[int]) -> _Group:
        return self._groups.setdefault((phase, level, tuple(shape)), _Group())

    def _place_operands(self, order: Sequence[fx.Node], live: set[fx.Node]) -> None:
        for node in order:
            port = self._places.ports.get(node)
            if port is None:
                continue
            if port.role is Role.PRODUCT:
                slot = (self._order.phase[node], self._order.level[node] - 1)
                self._slots.setdefault(slot, []).append(node)
            elif port.role is Role.OPERAND:
                full_view = whole_view(port, node)
                pieces = pieces_of(node, full_view) if node.target in ASSEMBLIES else [(node, full_view)]
                level = self._order.level[node] - (1 if node.target in ASSEMBLIES else 0)
                for piece, view in pieces:
                    if isinstance(piece, fx.Node):
                        self._get_group(self._order.phase[node], level, view.shape).results.append((piece, view))

    def _place_finals(self, finals: Sequence[tuple[fx.Node, Port]]) -> None:
        remaining: list[tuple[fx.Node, View, Phase, tuple[int, ...]]] = []
        for node, port in finals:
            full_view = whole_view(port, node)
            if self._is_written_directly(node, port):
                root, _ = self._places.root(node)
                self._direct_views[root] = full_view
                continue
            phase = Phase.AFTER if node in self._order.after else Phase.LOOP
            shape = unsummed_shape(node)
            level = self._order.level.get(node, 0)
            if node not in self._places.of_carried and (Phase.BEFORE, level, shape) in self._groups:
                phase = Phase.BEFORE
            if (phase, level, shape) in self._groups:
                self._groups[phase, level, shape].results.append((node, full_view))
            else:
                remaining.append((node, full_view, phase, shape))
        for node, full_view, phase, shape in remaining:
            last = max(self._order.level.get(n, 0) for n, _, p, s in remaining if (p, s) == (phase, shape))
            self._get_group(phase, last, shape).results.append((node, full_view))

    def _is_written_directly(self, node: fx.Node, port: Port) -> bool:
        """True if a result is a product that no other node reads."""
        root, views = self._places.root(node)
        if not self._places.is_product(root) or root in self._direct_views:
            return False
        if views and port.role is not self._role:
            return False  # the layout of such a result is fixed, so a product cannot be written through views
        for link in (root, *views):
            users = [u for u in link.users if u.op != "output" and u in self._order.level]
            returned = sum(entry is link for entry in self._entries)
            if len(users) + returned != 1:
                return False
        result_view: Tensor = replay([call_of(v) for v in views], torch.empty(root.meta["val"].shape, device="meta"))
        value: Tensor = root.meta["val"]
        return result_view.is_contiguous() and result_view.numel() == value.numel()

    def _list_parts(self, order: Sequence[fx.Node]) -> list[Stage | Product]:
        parts: list[Stage | Product] = []
        levels = [level for _, level, _ in self._groups] + [level for _, level in self._slots]
        for phase in Phase:
            for level in range(max(levels, default=0) + 1):
                for (p, n, shape), group in self._groups.items():
                    if (p, n) == (phase, level):
                        parts.append(self._build_stage(phase, shape, group))
                parts += [self._build_product(node) for node in self._slots.get((phase, level), ())]
        return parts

    def _build_product(self, node: fx.Node) -> Product:
        target: Any = node.target
        result = self._direct_views.get(node) or whole_view(self._places.ports[node], node)
        value = node.meta["val"]
        if target in REDUCTIONS:
            factors: list[Any] = [node.args[0]]
            dims: Any = node.args[1]
            last = [d - factors[0].meta["val"].dim() for d in dims]  # negative, because sequences have more dims
            args = (self._build_argument(node.args[0]), last, *node.args[2:])
        else:
            factors = [node.args[i] for i in PRODUCTS[target].factors]
            args = tuple(self._build_argument(a) for a in node.args)
        return Product(
            self._order.phase[node],
            target,
            args,
            {} if target in REDUCTIONS else dict(node.kwargs),
            result,
            tuple(value.shape),
            value.dtype,
            tuple(tuple(factor.meta["val"].shape) for factor in factors),
            called_op(node),
            location_of(node),
        )

    def _build_argument(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument in self._places.moving:
            return self._places.view(argument)
        port = self._matrices.setdefault(argument, Port(Role.MATRIX, len(self._matrices)))
        return whole_view(port, argument)

    def _is_cut(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        """True if a stage of the shape `shape` reads a node from memory instead of computing it."""
        root, views = self._places.root(node)
        port = self._places.ports.get(root)
        if port is None:
            return False
        if port.role is not Role.OPERAND:
            if node is root or port.role in (Role.PRODUCT, Role.SAVED) or any(self._places.moves(v) for v in views):
                return True
            return not reaches(root, shape) and reaches(node, shape)
        return root.target in ASSEMBLIES or any(self._places.moves(v) for v in views)

    def _build_stage(self, phase: Phase, shape: tuple[int, ...], group: _Group) -> Stage:
        requested = [node for node, _ in group.results]
        reads: dict[fx.Node, View] = {}
        lifted: set[fx.Node] = set()
        inner_nodes: set[fx.Node] = set()
        waiting = list(requested)
        while waiting:
            node = waiting.pop()
            if node in inner_nodes or node in reads or node in lifted:
                continue
            if node in self._places.moving and self._is_cut(node, shape):
                reads[node] = self._places.view(node)
            elif node.op == "placeholder":
                lifted.add(node)
            else:
                inner_nodes.add(node)
                waiting += node.all_input_nodes
        if not reads:  # the stage has only constants, but a kernel has to read some value of the step
            value_node = next(n for n in self._placeholders if n in self._places.moving)
            reads[value_node] = self._places.view(value_node)
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        ports: list[Port] = []
        views: list[View] = []
        lifted_indices: list[int | None] = []
        position = {n: i for i, n in enumerate(self._graph.nodes)}
        for node in sorted(reads, key=position.__getitem__):
            new[node] = copied = graph.placeholder(f"read_{len(ports)}")
            copied.meta["val"] = node.meta["val"]
            copied.stack_trace = node.stack_trace
            ports.append(Port(Role.INPUT, len(ports)))
            views.append(reads[node])
            lifted_indices.append(None)
        for node in sorted(lifted, key=position.__getitem__):
            index = self._arguments[self._placeholders.index(node)].index
            new[node] = copied = graph.placeholder(f"lifted_{index}")
            copied.meta["val"] = node.meta["val"]
            ports.append(Port(Role.LIFTED, index))
            lifted_indices.append(index)
        for node in self._graph.nodes:
            if node in inner_nodes:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output([new[node] for node in requested])
        module = fx.GraphModule(self._module, graph)
        gradient_of = [0 if view.source.role is Role.GRAD_INPUT else None for _, view in group.results]
        layouts: dict[int, LiftedLayout] = check_positions(module.graph, shape, lifted_indices, gradient_of, {})
        normal = normalize(module, [port.name for port in ports])
        writes = tuple(view for _, view in group.results)
        outputs = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
        return Stage(phase, StepGraph(normal, tuple(ports), outputs, layouts), shape, tuple(views), writes)

    # -- data -----------------------------------------------------------------------------------------------

    def _list_values(self) -> dict[Port, tuple[tuple[int, ...], torch.dtype]]:
        results = {}
        for node, port in self._places.ports.items():
            value = node.meta["val"]
            if isinstance(value, Tensor) and node not in self._direct_views:
                results[port] = (tuple(value.shape), value.dtype)
        for node, port in zip(self._entries, self._results, strict=True):
            if port.role is not Role.GRAD_LIFTED and port not in results:
                value = node.meta["val"]
                results[port] = (unsummed_shape(node), value.dtype)
        return results

    def _build_matrix_graph(self) -> fx.GraphModule:
        """A graph that computes the captured operands of products from the lifted tensors."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node, port in zip(self._placeholders, self._arguments, strict=True):
            if port.role is Role.LIFTED:
                new[node] = graph.placeholder(port.name)
        needed: set[fx.Node] = set()
        waiting = list(self._matrices)
        while waiting:
            node = waiting.pop()
            if node not in needed and node not in new:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in self._graph.nodes:
            if node in needed:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in self._matrices))
        return fx.GraphModule(self._module, graph)
