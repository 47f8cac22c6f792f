"""The tracer's result: a graph with the roles of its arguments and results, and the layouts of captured tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.ir._ports import Port, Role

# Maps the role of an argument to the role of its gradient.
GRADIENTS = {Role.INPUT: Role.GRAD_INPUT, Role.STATE: Role.GRAD_STATE, Role.LIFTED: Role.GRAD_LIFTED}


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One step as a normalised graph: the forward, or its vector-Jacobian product (VJP).

    Forward: `[*INPUT, *STATE, *LIFTED] -> [*OUTPUT, *STATE]`, followed by `*SAVED` if a VJP needs intermediates.
    VJP: `[*INPUT, *STATE, *LIFTED, *SAVED, *GRAD_OUTPUT, *GRAD_STATE] -> [*GRAD_INPUT, *GRAD_STATE, *GRAD_LIFTED]`. The
    arguments include only the cotangents that are present. The results include only gradients that are required and
    not identically zero. If an argument broadcasts to the step, its gradient has the step's shape and is summed later.

    Attributes:
        graph: pointwise ops that have facts (`facts_of`), on homogeneous dtypes, with Python numbers as constants.
            Each node has `meta["val"]`, a fake tensor, and, where known, a stack trace that ends in the user's line
            (`location_of`). The output is a tuple of nodes.
        arguments: ports of all placeholders in order, including unused placeholders.
        results: ports of the output's entries in order.
        layouts: layouts of the lifted tensors by index. A step's forward graph and VJPs share the layouts. A tensor
            that the graph never reads has no layout.
    """

    graph: fx.Graph
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    layouts: dict[int, LiftedLayout]

    @property
    def placeholders(self) -> dict[Port, fx.Node]:
        """The placeholder node of each argument."""
        nodes = (node for node in self.graph.nodes if node.op == "placeholder")
        return dict(zip(self.arguments, nodes, strict=True))

    @property
    def used(self) -> frozenset[Port]:
        """The arguments that the graph uses."""
        return frozenset(port for port, node in self.placeholders.items() if node.users)

    @property
    def entries(self) -> tuple[Any, ...]:
        """The nodes of the results."""
        entries: tuple[Any, ...] = next(n for n in reversed(self.graph.nodes) if n.op == "output").args[0]
        return entries

    @property
    def is_of_any_batch(self) -> bool:
        """True if no lifted tensor varies along the step's first dimension."""
        return all(layout.strides[:1] == (0,) for layout in self.layouts.values())

    @property
    def gradients(self) -> tuple[int | None, ...]:
        """For each of `[*inputs, *states, *lifted]`, the index of its gradient among a VJP's results, or `None`."""
        gradient_ports = [Port(GRADIENTS[p.role], p.index) for p in self.arguments if p.role in GRADIENTS]
        return tuple(self.results.index(port) if port in self.results else None for port in gradient_ports)
