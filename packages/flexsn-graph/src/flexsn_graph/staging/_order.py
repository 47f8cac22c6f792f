"""Finds the order of the parts of a step: their phase (before, in or after the loop over time), and their level."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from flexsn_graph.ir._ports import Role
from flexsn_graph.ir._products import ASSEMBLIES
from flexsn_graph.staging._places import Places
from flexsn_graph.staging._staged_step import Phase

# If the operand of a sum over time is computed from more states than this number, a stage after the loop computes the
# operand.
_MANY_STATES = 8


class Order:
    """The phase and level at which each value is computed.

    Args:
        places: the values that have a place in memory.
        order: the nodes that are needed for the results, in the order of the graph.
        to_carried: the nodes on which the carried values depend. Carried values pass from one step to the next.
        summed: values that are summed over time for the gradients of captured tensors.

    Attributes:
        phase: phases of products and operands.
        level: for each node, the length of the longest chain of products before it.
        after: nodes that are computed after the loop.
    """

    def __init__(
        self, places: Places, order: Sequence[fx.Node], to_carried: set[fx.Node], summed: Sequence[fx.Node]
    ) -> None:
        self._places = places
        self.phase: dict[fx.Node, Phase] = {}
        self.level: dict[fx.Node, int] = {}
        self.after = {node for node in summed if self._can_wait(node, to_carried)}
        self._find_phases(order, to_carried)
        self._find_levels(order)

    def _can_wait(self, node: fx.Node, to_carried: set[fx.Node]) -> bool:
        """True for an operand that the loop does not need, and that is computed from many states, as for a delay.

        An operand that is computed from the gradient of a state cannot wait.
        """
        places = self._places
        if places.role(node) is not Role.OPERAND or node in to_carried:
            return False
        read: set[fx.Node] = set()
        waiting = [*node.all_input_nodes]
        while waiting:
            ancestor = waiting.pop()
            if ancestor in places.moving and ancestor not in read:
                read.add(ancestor)
                waiting += [] if ancestor in places.ports else ancestor.all_input_nodes
        roles = [places.role(ancestor) for ancestor in read - to_carried]
        return (
            Role.GRAD_STATE not in {places.role(ancestor) for ancestor in read}
            and roles.count(Role.STATE) > _MANY_STATES
        )

    def _find_phases(self, order: Sequence[fx.Node], to_carried: set[fx.Node]) -> None:
        places = self._places
        for node in order:
            is_after = not self.after.isdisjoint(node.all_input_nodes)
            if places.is_product(node):
                if node not in places.of_carried:
                    self.phase[node] = Phase.BEFORE
                else:
                    self.phase[node] = Phase.LOOP if node in to_carried else Phase.AFTER
                is_after = self.phase[node] is Phase.AFTER
            if is_after and places.role(node) is not Role.SAVED:
                self.after.add(node)
        early: set[fx.Node] = set()
        for node in reversed(order):  # a value that is read before the loop is also written before the loop
            if self.phase.get(node) is Phase.BEFORE or node in early:
                early.update(places.root(a)[0] for a in node.all_input_nodes if a in places.moving)
        for node in order:
            if places.role(node) is Role.OPERAND:
                if node in self.after:
                    self.phase[node] = Phase.AFTER
                else:
                    is_before = node in early and node not in places.of_carried
                    self.phase[node] = Phase.BEFORE if is_before else Phase.LOOP

    def _find_levels(self, order: Sequence[fx.Node]) -> None:
        """Sets the length of the longest chain of products before each node."""
        places = self._places
        for node in order:
            port = places.ports.get(node)
            moving = [a for a in node.all_input_nodes if a in places.moving]
            if port is not None and port.role not in (Role.OPERAND, Role.PRODUCT):
                self.level[node] = 0
            elif places.is_product(node):
                self.level[node] = 1 + max(self._find_ready_level(a) for a in moving)
            elif node.target in ASSEMBLIES:
                self.level[node] = 1 + max((self.level[a] for a in moving), default=0)
            elif places.moves(node) and places.root(node)[0].target not in ASSEMBLIES:
                root = places.root(node)[0]
                written = places.ports[root].role is Role.OPERAND
                self.level[node] = self.level[root] + (1 if written else 0)
            else:
                self.level[node] = max((self.level[a] for a in moving), default=0)

    def _find_ready_level(self, node: fx.Node) -> int:
        """The level of stages after which a product can read the value of a node."""
        places = self._places
        root, _ = places.root(node)
        return self.level[root] - 1 if root.target in ASSEMBLIES and root in self.phase else self.level[root]
