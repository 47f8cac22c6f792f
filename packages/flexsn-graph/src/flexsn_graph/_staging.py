"""Takes a step with matrix products apart: into pointwise stages, one kernel each, and the products between them.

A graph of a step is lowered to pointwise ops, views, and products with matrices that are made of captured tensors
alone. A pointwise value that a product reads is an operand: a stage writes it. What a stage reads are arguments of the
step, and products, possibly through views (a quarter of the columns, say, for a gate of an LSTM). What lies between is
computed again in each stage that needs it: stages read and write nothing else.

A product belongs to the loop over time if the state after the step depends on it and it depends on the state before.
One that depends on inputs alone is computed before the loop for all steps at once; one that no later step needs (the
readout of a layer) behind it, for all steps at once, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._layout import LiftedLayout
from flexsn_graph._location import called_op, location_of
from flexsn_graph._normalize import normalize
from flexsn_graph._ops import ALIAS_OPS, SUM_OP
from flexsn_graph._ports import Port, Role
from flexsn_graph._positions import check_positions
from flexsn_graph._products import (
    ASSEMBLIES,
    CAT_OP,
    COPY_OP,
    PRODUCTS,
    SELECT_BACKWARD_OP,
    Call,
    call_of,
    is_linear_in_one,
    replay,
)
from flexsn_graph._staged_step import Phase, Product, Stage, StagedStep, Term, View
from flexsn_graph._step_graph import StepGraph
from flexsn_graph._strides import broadcast_shapes
from flexsn_graph.errors import NonPointwiseError

_aten = torch.ops.aten
_prims = torch.ops.prims
_SAME = frozenset({_aten.detach.default, _aten.alias.default, _prims.view_of.default})


class Keys:
    """Tells values of two graphs of one step that are computed alike."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, graph: fx.Graph, arguments: Sequence[Port]) -> dict[fx.Node, int]:
        """Equal numbers for equal values."""
        found: dict[fx.Node, int] = {}
        ports = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                key: Any = next(ports)
            elif node.op == "call_function":
                key = (node.target, _frozen(node.args, found), _frozen(node.kwargs, found), _dtype_of(node))
            else:
                continue
            found[node] = self._numbers.setdefault(key, len(self._numbers))
        return found


def _frozen(value: Any, found: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", found.get(value, value))
    if isinstance(value, list | tuple):
        return tuple(_frozen(v, found) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v, found)) for k, v in sorted(value.items()))
    return (type(value).__name__, repr(value))


def _dtype_of(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def has_products(graph: fx.Graph, arguments: Sequence[Port]) -> bool:
    """Whether a lowered graph multiplies a value of the step by a matrix."""
    moving: set[fx.Node] = set()
    ports = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(ports).role is not Role.LIFTED:
                moving.add(node)
        elif not moving.isdisjoint(node.all_input_nodes):
            if node.target in PRODUCTS:
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
    known: Mapping[int, Port] | None = None,
) -> tuple[StagedStep, dict[int, Port]]:
    """Takes a lowered graph apart.

    Args:
        module: lowered, products and views included.
        arguments: of its placeholders.
        results: of its output's entries.
        carried: the role that goes from step to step: of the forward, `STATE`; of a VJP, `GRAD_STATE`.
        keys: the same for both graphs of a step.
        known: of a VJP: by key, the values of the forward that there are.

    Returns:
        The parts, and by key, the operands and products.

    Raises:
        NonPointwiseError: an op mixes elements of the step in another way than by a product along the last dimension.
    """
    return _Staging(module, tuple(arguments), tuple(results), carried, keys, known or {}).run()


@dataclass(slots=True)
class _Group:
    """A stage to be."""

    results: list[tuple[fx.Node, View]] = field(default_factory=list)


class _Staging:
    def __init__(
        self,
        module: fx.GraphModule,
        arguments: tuple[Port, ...],
        results: tuple[Port, ...],
        carried: Role,
        keys: Keys,
        known: Mapping[int, Port],
    ) -> None:
        self._module = module
        self._graph = graph = module.graph
        _drop_copies(graph)
        self._arguments, self._results = arguments, results
        self._role = carried
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._entries: list[fx.Node] = list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])
        self._keys = keys.of(graph, arguments)
        self._known = known
        # Values that have a place in memory, by the node that is the whole of one.
        self._ports: dict[fx.Node, Port] = {}
        self._moving: set[fx.Node] = set()
        self._of_carried: set[fx.Node] = set()
        self._saved: list[Port] = []
        self._counts = {Role.OPERAND: 0, Role.PRODUCT: 0}
        self._matrices: dict[fx.Node, Port] = {}
        self._level: dict[fx.Node, int] = {}
        self._phase: dict[fx.Node, Phase] = {}
        self._after: set[fx.Node] = set()
        self._groups: dict[tuple[Phase, int, tuple[int, ...]], _Group] = {}
        self._slots: dict[tuple[Phase, int], list[fx.Node]] = {}
        self._direct: dict[fx.Node, View] = {}
        self._terms: list[Term] = []
        self._assembled: set[Port] = set()

    def run(self) -> tuple[StagedStep, dict[int, Port]]:
        self._look_at_dependence()
        finals, leaves = self._split_results()
        live = self._reaching([n for n, _ in finals] + leaves)
        to_carried = self._reaching([n for n, port in finals if port.role is self._role])
        order = [n for n in self._graph.nodes if n in live]
        for node in order:
            if node.target in PRODUCTS and node in self._moving and node not in self._ports:
                self._check_product(node)
                self._store(node, Role.PRODUCT)
        for node in order:
            self._store_operands(node)
        for leaf in leaves:
            self._store_root(leaf)
        self._find_phases(order, to_carried)
        self._find_levels(order)
        self._place_operands(order, live)
        self._place_finals(finals)
        parts = self._parts(order)
        values = self._values()
        staged = StagedStep(
            self._arguments,
            self._results,
            tuple(parts),
            values,
            frozenset(self._assembled),
            self._matrix_graph(),
            len(self._matrices),
            tuple(self._saved),
            tuple(self._make_terms()),
        )
        computed = (Role.OPERAND, Role.PRODUCT)
        offered = {
            self._keys[n]: port
            for n, port in self._ports.items()
            if port.role in computed and n not in self._direct
        }
        return staged, offered

    # -- what depends on what ------------------------------------------------------------------------------

    def _look_at_dependence(self) -> None:
        ports = dict(zip(self._placeholders, self._arguments, strict=True))
        for node in self._graph.nodes:
            if node.op == "placeholder":
                port = ports[node]
                if port.role is not Role.LIFTED:
                    self._ports[node] = port
                    self._moving.add(node)
                if port.role is self._role:
                    self._of_carried.add(node)
                continue
            if self._moving.isdisjoint(node.all_input_nodes):
                continue
            self._moving.add(node)
            if self._keys.get(node) in self._known and node.op == "call_function":
                self._ports[node] = Port(Role.SAVED, len(self._saved))
                self._saved.append(self._known[self._keys[node]])
            elif not self._of_carried.isdisjoint(node.all_input_nodes):
                self._of_carried.add(node)

    def _reaching(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """What the ends are computed from, up to what is saved; captured tensors aside."""
        found: set[fx.Node] = set()
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node in found or node not in self._moving:
                continue
            found.add(node)
            if not (node in self._ports and self._ports[node].role is Role.SAVED):
                waiting += node.all_input_nodes
        return found

    def _root(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """What a node is a view of, and the views, the first one first."""
        views: list[fx.Node] = []
        while node not in self._ports and _is_view(node):
            views.append(node)
            node = node.all_input_nodes[0]
        views.reverse()
        return node, views

    def _view(self, node: fx.Node) -> View:
        """A node as a view of a value that has a place."""
        root, views = self._root(node)
        value = node.meta["val"]
        return View(self._ports[root], tuple(call_of(v) for v in views), tuple(value.shape), value.dtype)

    # -- results ---------------------------------------------------------------------------------------------

    def _split_results(self) -> tuple[list[tuple[fx.Node, Port]], list[fx.Node]]:
        """The results that parts write, and the values whose sums are gradients of lifted tensors."""
        finals: list[tuple[fx.Node, Port]] = []
        self._sums: list[tuple[int, fx.Node, tuple[Call, ...]]] = []
        leaves: list[fx.Node] = []
        for node, port in zip(self._entries, self._results, strict=True):
            if port.role is not Role.GRAD_LIFTED:
                finals.append((node, port))
                continue
            for leaf, calls in self._summands(node, ()):
                self._sums.append((port.index, leaf, calls))
                factors = self._factors(leaf)
                leaves += factors or [leaf]
        return finals, leaves

    def _summands(self, node: fx.Node, calls: tuple[Call, ...]) -> list[tuple[fx.Node, tuple[Call, ...]]]:
        """A gradient as a sum: what is summed over time, and the linear ops behind the sum."""
        found: list[tuple[fx.Node, tuple[Call, ...]]] = []
        waiting = [(node, calls)]
        while waiting:
            node, calls = waiting.pop()
            if node in self._ports or self._factors(node) or not self._is_behind_a_sum(node):
                found.append((node, calls))
            elif node.target is _prims.add.default:
                waiting += [(a, calls) for a in node.args if isinstance(a, fx.Node)]
            else:
                waiting.append((node.all_input_nodes[0], (call_of(node), *calls)))
        return found

    def _is_behind_a_sum(self, node: fx.Node) -> bool:
        """Whether linear ops lead to a sum over elements or a product of two values: they are for after the loop."""
        while node not in self._ports and is_linear_in_one(node):
            if node.target is SUM_OP:
                return True
            node = node.all_input_nodes[0]
        if node.target is _prims.add.default and not any(_differs(a, node) for a in node.args):
            return any(self._is_behind_a_sum(a) for a in node.all_input_nodes)
        return bool(self._factors(node))

    def _factors(self, node: fx.Node) -> list[fx.Node]:
        """The factors of a product of two values of the step, as the gradient of a matrix is; empty: it is none."""
        target: Any = node.target
        facts = PRODUCTS.get(target)
        if facts is None or facts.added is not None or node in self._ports:
            return []
        factors = [node.args[position] for position in facts.factors]
        found = [f for f in factors if isinstance(f, fx.Node) and f in self._moving]
        return found if len(found) == 2 else []

    def _make_terms(self) -> Iterable[Term]:
        for lifted, leaf, calls in self._sums:
            factors = self._factors(leaf)
            if factors:
                target: Any = leaf.target
                yield Term(lifted, target, tuple(self._view(f) for f in factors), calls)
            else:
                yield Term(lifted, None, (self._view(leaf),), calls)

    # -- what has a place ------------------------------------------------------------------------------------

    def _store(self, node: fx.Node, role: Role) -> None:
        if node not in self._ports:
            self._ports[node] = Port(role, self._counts[role])
            self._counts[role] += 1
            if node.target in ASSEMBLIES:
                self._assembled.add(self._ports[node])

    def _store_root(self, node: fx.Node) -> None:
        root, _ = self._root(node)
        if root in self._moving:
            self._store(root, Role.OPERAND)

    def _store_operands(self, node: fx.Node) -> None:
        if self._ports.get(node, _NOTHING).role is Role.SAVED:
            return
        if self._is_product(node):
            for argument in self._moving_arguments(node):
                self._store_root(argument)
        elif node.target in ASSEMBLIES:
            self._store(node, Role.OPERAND)
        elif _narrows(node):
            self._store_root(node)

    def _is_product(self, node: fx.Node) -> bool:
        return node in self._ports and self._ports[node].role is Role.PRODUCT

    def _moving_arguments(self, node: fx.Node) -> list[fx.Node]:
        return [a for a in node.args if isinstance(a, fx.Node) and a in self._moving]

    def _check_product(self, node: fx.Node) -> None:
        target: Any = node.target
        facts = PRODUCTS[target]
        moving = [i for i, position in enumerate(facts.factors) if node.args[position] in self._moving]
        if len(moving) != 1:
            what = "two values of the step by each other" if moving else "captured tensors alone, and adds to them"
            raise NonPointwiseError(
                f"{called_op(node)} multiplies {what}: one factor of a product in a step has to be made of captured "
                "tensors alone. For element-by-element products, write `*`.",
                called_op(node),
                location_of(node),
            )
        (side,) = moving
        factor = node.args[facts.factors[side]]
        assert isinstance(factor, fx.Node)
        root, views = self._root(factor)
        shape = tuple(root.meta["val"].shape)
        seen: Tensor = replay([call_of(v) for v in views], torch.empty(shape, device="meta"))
        dim = facts.contracted[side]
        last = shape[-1] if shape else 1
        if seen.shape[dim] > 1 and seen.stride(dim) * (seen.shape[dim] - 1) >= last:
            raise NonPointwiseError(
                f"{called_op(node)} sums over another dimension than the last one of what it is given, "
                f"{list(shape)}: a product in a step goes along the step's last dimension. Move the dimension that "
                "is multiplied to the end, outside of the core.",
                called_op(node),
                location_of(node),
            )

    # -- when ------------------------------------------------------------------------------------------------

    def _find_phases(self, order: Sequence[fx.Node], to_carried: set[fx.Node]) -> None:
        for node in order:
            behind = not self._after.isdisjoint(node.all_input_nodes)
            if self._is_product(node):
                if node not in self._of_carried:
                    self._phase[node] = Phase.BEFORE
                else:
                    self._phase[node] = Phase.LOOP if node in to_carried else Phase.AFTER
                behind = self._phase[node] is Phase.AFTER
            if behind and not (node in self._ports and self._ports[node].role is Role.SAVED):
                self._after.add(node)
        early: set[fx.Node] = set()
        for node in reversed(order):  # what is read before the loop is written before it
            if self._phase.get(node) is Phase.BEFORE or node in early:
                early.update(self._root(a)[0] for a in node.all_input_nodes if a in self._moving)
        for node in order:
            if self._ports.get(node, _NOTHING).role is Role.OPERAND:
                if node in self._after:
                    self._phase[node] = Phase.AFTER
                else:
                    first = node in early and node not in self._of_carried
                    self._phase[node] = Phase.BEFORE if first else Phase.LOOP

    def _find_levels(self, order: Sequence[fx.Node]) -> None:
        """How many products, one after the other, there are before each node."""
        for node in order:
            port = self._ports.get(node)
            moving = [a for a in node.all_input_nodes if a in self._moving]
            if port is not None and port.role not in (Role.OPERAND, Role.PRODUCT):
                self._level[node] = 0
            elif self._is_product(node):
                self._level[node] = 1 + max(self._ready(a) for a in moving)
            elif node.target in ASSEMBLIES:
                self._level[node] = 1 + max((self._level[a] for a in moving), default=0)
            elif _narrows(node) and self._root(node)[0].target not in ASSEMBLIES:
                root = self._root(node)[0]
                written = self._ports[root].role is Role.OPERAND
                self._level[node] = self._level[root] + (1 if written else 0)
            else:
                self._level[node] = max((self._level[a] for a in moving), default=0)

    def _ready(self, node: fx.Node) -> int:
        """After which level of stages a product can read a value."""
        root, _ = self._root(node)
        return self._level[root] - 1 if root.target in ASSEMBLIES and root in self._phase else self._level[root]

    # -- stages ----------------------------------------------------------------------------------------------

    def _group(self, phase: Phase, level: int, shape: Sequence[int]) -> _Group:
        return self._groups.setdefault((phase, level, tuple(shape)), _Group())

    def _place_operands(self, order: Sequence[fx.Node], live: set[fx.Node]) -> None:
        for node in order:
            port = self._ports.get(node)
            if port is None:
                continue
            if port.role is Role.PRODUCT:
                slot = (self._phase[node], self._level[node] - 1)
                self._slots.setdefault(slot, []).append(node)
            elif port.role is Role.OPERAND:
                whole = _whole(port, node)
                pieces = _pieces(node, whole) if node.target in ASSEMBLIES else [(node, whole)]
                level = self._level[node] - (1 if node.target in ASSEMBLIES else 0)
                for piece, view in pieces:
                    if isinstance(piece, fx.Node):
                        self._group(self._phase[node], level, view.shape).results.append((piece, view))

    def _place_finals(self, finals: Sequence[tuple[fx.Node, Port]]) -> None:
        waiting: list[tuple[fx.Node, View, Phase, tuple[int, ...]]] = []
        for node, port in finals:
            whole = _whole(port, node)
            if self._goes_directly(node, port):
                root, _ = self._root(node)
                self._direct[root] = whole
                continue
            phase = Phase.AFTER if node in self._after else Phase.LOOP
            shape = _unsummed(node)
            level = self._level.get(node, 0)
            if node not in self._of_carried and (Phase.BEFORE, level, shape) in self._groups:
                phase = Phase.BEFORE
            if (phase, level, shape) in self._groups:
                self._groups[phase, level, shape].results.append((node, whole))
            else:
                waiting.append((node, whole, phase, shape))
        for node, whole, phase, shape in waiting:
            last = max(self._level.get(n, 0) for n, _, p, s in waiting if (p, s) == (phase, shape))
            self._group(phase, last, shape).results.append((node, whole))

    def _goes_directly(self, node: fx.Node, port: Port) -> bool:
        """Whether a result is a product, and nothing else reads that."""
        root, views = self._root(node)
        if not self._is_product(root) or root in self._direct:
            return False
        if views and port.role is not self._role:
            return False  # whoever made the memory decides how it lies
        for one in (root, *views):
            users = [u for u in one.users if u.op != "output" and u in self._level]
            returned = sum(entry is one for entry in self._entries)
            if len(users) + returned != 1:
                return False
        seen: Tensor = replay([call_of(v) for v in views], torch.empty(root.meta["val"].shape, device="meta"))
        value: Tensor = root.meta["val"]
        return seen.is_contiguous() and seen.numel() == value.numel()

    def _parts(self, order: Sequence[fx.Node]) -> list[Stage | Product]:
        parts: list[Stage | Product] = []
        levels = [level for _, level, _ in self._groups] + [level for _, level in self._slots]
        for phase in Phase:
            for level in range(max(levels, default=0) + 1):
                for (p, n, shape), group in self._groups.items():
                    if (p, n) == (phase, level):
                        parts.append(self._stage(phase, shape, group))
                parts += [self._product(node) for node in self._slots.get((phase, level), ())]
        return parts

    def _product(self, node: fx.Node) -> Product:
        target: Any = node.target
        result = self._direct.get(node) or _whole(self._ports[node], node)
        value = node.meta["val"]
        factors: list[Any] = [node.args[i] for i in PRODUCTS[target].factors]
        return Product(
            self._phase[node],
            target,
            tuple(self._product_argument(a) for a in node.args),
            dict(node.kwargs),
            result,
            tuple(value.shape),
            value.dtype,
            tuple(tuple(factor.meta["val"].shape) for factor in factors),
            called_op(node),
            location_of(node),
        )

    def _product_argument(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument in self._moving:
            return self._view(argument)
        port = self._matrices.setdefault(argument, Port(Role.MATRIX, len(self._matrices)))
        return _whole(port, argument)

    def _is_cut(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        """Whether a stage of this shape reads a node from memory."""
        root, views = self._root(node)
        port = self._ports.get(root)
        if port is None:
            return False
        if port.role is not Role.OPERAND:
            if node is root or port.role in (Role.PRODUCT, Role.SAVED) or any(_narrows(v) for v in views):
                return True
            return not _reaches(root, shape) and _reaches(node, shape)
        return root.target in ASSEMBLIES or any(_narrows(v) for v in views)

    def _stage(self, phase: Phase, shape: tuple[int, ...], group: _Group) -> Stage:
        wanted = [node for node, _ in group.results]
        reads: dict[fx.Node, View] = {}
        lifted: set[fx.Node] = set()
        inside: set[fx.Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node in inside or node in reads or node in lifted:
                continue
            if node in self._moving and self._is_cut(node, shape):
                reads[node] = self._view(node)
            elif node.op == "placeholder":
                lifted.add(node)
            else:
                inside.add(node)
                waiting += node.all_input_nodes
        if not reads:  # constants: a kernel needs something of the step
            some = next(n for n in self._placeholders if n in self._moving)
            reads[some] = self._view(some)
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        ports: list[Port] = []
        seen_as: list[View] = []
        lifted_indices: list[int | None] = []
        position = {n: i for i, n in enumerate(self._graph.nodes)}
        for node in sorted(reads, key=position.__getitem__):
            new[node] = copied = graph.placeholder(f"read_{len(ports)}")
            copied.meta["val"] = node.meta["val"]
            copied.stack_trace = node.stack_trace
            ports.append(Port(Role.INPUT, len(ports)))
            seen_as.append(reads[node])
            lifted_indices.append(None)
        for node in sorted(lifted, key=position.__getitem__):
            index = self._arguments[self._placeholders.index(node)].index
            new[node] = copied = graph.placeholder(f"lifted_{index}")
            copied.meta["val"] = node.meta["val"]
            ports.append(Port(Role.LIFTED, index))
            lifted_indices.append(index)
        for node in self._graph.nodes:
            if node in inside:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output([new[node] for node in wanted])
        module = fx.GraphModule(self._module, graph)
        gradient_of = [0 if view.source.role is Role.GRAD_INPUT else None for _, view in group.results]
        layouts: dict[int, LiftedLayout] = check_positions(module.graph, shape, lifted_indices, gradient_of, {})
        normal = normalize(module, [port.name for port in ports])
        writes = tuple(view for _, view in group.results)
        outputs = tuple(Port(Role.OUTPUT, i) for i in range(len(writes)))
        return Stage(phase, StepGraph(normal, tuple(ports), outputs, layouts), shape, tuple(seen_as), writes)

    # -- the rest --------------------------------------------------------------------------------------------

    def _values(self) -> dict[Port, tuple[tuple[int, ...], torch.dtype]]:
        found = {}
        for node, port in self._ports.items():
            value = node.meta["val"]
            if isinstance(value, Tensor) and node not in self._direct:
                found[port] = (tuple(value.shape), value.dtype)
        for node, port in zip(self._entries, self._results, strict=True):
            if port.role is not Role.GRAD_LIFTED and port not in found:
                value = node.meta["val"]
                found[port] = (_unsummed(node), value.dtype)
        return found

    def _matrix_graph(self) -> fx.GraphModule:
        """What products take of captured tensors, from the lifted ones."""
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


_NOTHING = Port(Role.CAME_STATE, -1)


def _drop_copies(graph: fx.Graph) -> None:
    """Nothing is written to in a functional graph: aliases are what they are of.

    So are copies, unless a view of one has no strides otherwise.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
    needed: set[fx.Node] = set()
    while True:
        copy = _copy_before_a_view(graph, needed)
        if copy is None:
            break
        needed.add(copy)
    for node in graph.nodes:
        if node.target is COPY_OP and node not in needed:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _copy_before_a_view(graph: fx.Graph, needed: set[fx.Node]) -> fx.Node | None:
    """A copy that has to stay because of a view of it; `None`: there is no other one."""
    seen: dict[fx.Node, Any] = {}
    behind: dict[fx.Node, fx.Node | None] = {}  # the copy that a value is a view of
    for node in graph.nodes:
        source = node.all_input_nodes[0] if _is_view(node) or node.target is COPY_OP else None
        if source is None or node in needed:
            value = node.meta.get("val")
            seen[node] = torch.empty(value.shape, device="meta") if isinstance(value, Tensor) else None
            behind[node] = None
        elif node.target is COPY_OP:
            seen[node], behind[node] = seen[source], node
        else:
            behind[node] = behind[source]
            try:
                seen[node] = replay([call_of(node)], seen[source])
            except RuntimeError:
                if behind[node] is None:
                    raise
                return behind[node]
    return None


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return node.op == "call_function" and (
        (target in ALIAS_OPS and target is not COPY_OP) or target is operator.getitem
    )


def _narrows(node: fx.Node) -> bool:
    """Whether a view has some of the elements only; a part of a tuple of views has."""
    if not _is_view(node):
        return False
    if node.target is operator.getitem:
        return True
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return isinstance(value, Tensor) and isinstance(source, Tensor) and value.numel() < source.numel()


def _differs(argument: Any, node: fx.Node) -> bool:
    """Whether an argument of an op broadcasts to the result, or is a number."""
    return not isinstance(argument, fx.Node) or argument.meta["val"].shape != node.meta["val"].shape


def _reaches(node: fx.Node, shape: tuple[int, ...]) -> bool:
    return broadcast_shapes([tuple(node.meta["val"].shape), shape]) == shape


def _whole(port: Port, node: fx.Node) -> View:
    value = node.meta["val"]
    shape = _unsummed(node) if port.role is Role.GRAD_INPUT else tuple(value.shape)
    return View(port, (), shape, value.dtype)


def _unsummed(node: fx.Node) -> tuple[int, ...]:
    """The shape of a gradient before it is summed to that of what it is the gradient of."""
    shape = tuple(node.meta["val"].shape)
    while _is_view(node) or node.target is SUM_OP:
        if node.target is SUM_OP:
            shape = tuple(node.all_input_nodes[0].meta["val"].shape)
        node = node.all_input_nodes[0]
    return shape


def _pieces(node: fx.Node, whole: View) -> list[tuple[Any, View]]:
    """What an assembled value is made of, and where it stands in it."""
    target: Any = node.target
    args: Any = node.args
    if target is CAT_OP:
        dim = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
        start, pieces = 0, []
        for piece in args[0]:
            value = piece.meta["val"]
            end = start + value.shape[dim]
            call: Call = (_aten.slice.Tensor, (dim, start, end), {})
            pieces.append((piece, View(whole.source, (call,), tuple(value.shape), value.dtype)))
            start = end
        return pieces
    if target is COPY_OP:
        return [(args[0], whole)]
    value = args[0].meta["val"]
    if target is SELECT_BACKWARD_OP:
        call = (_aten.select.int, tuple(args[2:4]), {})
    else:
        call = (_aten.slice.Tensor, tuple(args[2:]), {})
    return [(args[0], View(whole.source, (call,), tuple(value.shape), value.dtype))]
