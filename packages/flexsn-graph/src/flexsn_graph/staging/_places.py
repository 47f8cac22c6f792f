"""Assigns places in memory to values of a step, and finds the values that depend on the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, fx

from flexsn_graph.ir._ports import Port, Role
from flexsn_graph.ir._products import ASSEMBLIES, REDUCTIONS, call_of
from flexsn_graph.staging._staged_step import View
from flexsn_graph.staging._views import is_view, narrows, realigns


class Places:
    """The values that stages and products read and write.

    Args:
        graph: graph of the step.
        arguments: ports of its placeholders.
        carried: role of the values that are carried from step to step.
        keys: numbers of the nodes. Equal values have equal numbers.
        existing: ports of the values that already exist, by the number in `keys`.

    Attributes:
        ports: the ports of values that have a place in memory, by the node that represents the whole value.
        moving: nodes that depend on values of the step. Each other node depends on captured tensors alone.
        of_carried: nodes that depend on carried values.
        saved: the ports of `existing` whose values are read.
        assembled: values that several parts write, one piece each.
        rows: values with one element per row that are computed from reductions. `find_rows` finds these values.
    """

    def __init__(
        self,
        graph: fx.Graph,
        arguments: Sequence[Port],
        carried: Role,
        keys: Mapping[fx.Node, int],
        existing: Mapping[int, Port],
    ) -> None:
        self.ports: dict[fx.Node, Port] = {}
        self.moving: set[fx.Node] = set()
        self.of_carried: set[fx.Node] = set()
        self.saved: list[Port] = []
        self.assembled: set[Port] = set()
        self.rows: set[fx.Node] = set()
        self._counts = {Role.OPERAND: 0, Role.PRODUCT: 0}
        ports = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                port = next(ports)
                if port.role is not Role.LIFTED:
                    self.ports[node] = port
                    self.moving.add(node)
                if port.role is carried:
                    self.of_carried.add(node)
                continue
            if self.moving.isdisjoint(node.all_input_nodes):
                continue
            self.moving.add(node)
            if keys.get(node) in existing and node.op == "call_function":
                self.ports[node] = Port(Role.SAVED, len(self.saved))
                self.saved.append(existing[keys[node]])
            elif not self.of_carried.isdisjoint(node.all_input_nodes):
                self.of_carried.add(node)

    def find_rows(self, graph: fx.Graph) -> None:
        """Finds the values that are computed from reductions alone. The reductions must already have places."""
        for node in graph.nodes:
            moving = [a for a in node.all_input_nodes if a in self.moving]
            if node in self.ports and node.target in REDUCTIONS:
                self.rows.add(node)
            elif node.op == "call_function" and moving and self.rows.issuperset(moving):
                value = node.meta["val"]
                if isinstance(value, Tensor) and value.numel() == max(a.meta["val"].numel() for a in moving):
                    self.rows.add(node)

    def moves(self, node: fx.Node) -> bool:
        """True for a view that drops elements or turns columns into rows. Stages read such a view from memory."""
        return narrows(node) or (realigns(node) and node.all_input_nodes[0] in self.rows)

    def reaching(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes of the step from which `ends` are computed, including `ends`. Saved values are not traced back."""
        results: set[fx.Node] = set()
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node in results or node not in self.moving:
                continue
            results.add(node)
            if self.role(node) is not Role.SAVED:
                waiting += node.all_input_nodes
        return results

    def root(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """The node of which `node` is a view, and the views between the two nodes, starting with the first view."""
        views: list[fx.Node] = []
        while node not in self.ports and is_view(node):
            views.append(node)
            node = node.all_input_nodes[0]
        views.reverse()
        return node, views

    def view(self, node: fx.Node) -> View:
        """A `View` that leads to the node from a value that has a place."""
        root, views = self.root(node)
        value = node.meta["val"]
        return View(self.ports[root], tuple(call_of(v) for v in views), tuple(value.shape), value.dtype)

    def role(self, node: fx.Node) -> Role | None:
        """Role of a value that has a place, or `None` for other values."""
        port = self.ports.get(node)
        return None if port is None else port.role

    def store(self, node: fx.Node, role: Role) -> None:
        """Assigns a place to a value."""
        if node not in self.ports:
            self.ports[node] = Port(role, self._counts[role])
            self._counts[role] += 1
            if node.target in ASSEMBLIES:
                self.assembled.add(self.ports[node])

    def store_root(self, node: fx.Node) -> None:
        """Assigns a place to the value of which a node is a view."""
        root, _ = self.root(node)
        if root in self.moving:
            self.store(root, Role.OPERAND)

    def store_operands(self, node: fx.Node) -> None:
        """Assigns places to the values that a node reads from memory, and to a node that is assembled from pieces."""
        if self.role(node) is Role.SAVED:
            return
        if self.is_product(node):
            for argument in self.moving_arguments(node):
                self.store_root(argument)
        elif node.target in ASSEMBLIES:
            self.store(node, Role.OPERAND)
        elif self.moves(node):
            self.store_root(node)

    def is_product(self, node: fx.Node) -> bool:
        """True if the node is a product that this step computes."""
        return self.role(node) is Role.PRODUCT

    def moving_arguments(self, node: fx.Node) -> list[fx.Node]:
        """The arguments that depend on values of the step."""
        return [a for a in node.args if isinstance(a, fx.Node) and a in self.moving]
