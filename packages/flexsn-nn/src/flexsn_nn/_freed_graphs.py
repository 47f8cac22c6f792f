"""Detects that a state of the loop belongs to the freed graph of an earlier step, before torch raises its error."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsn_nn._torch_private import current_node, keeps_graph
from flexsn_runtime import FreedGraphError, transform_at_work

# Metadata key of a graph node. Its value identifies the call whose output the node computes.
_CALL = "flexsn_nn.call"
# Maximum number of nodes that are searched for freed tensors. A step of the loop has a few dozen nodes.
_MOST_NODES = 4096
# Maximum number of nodes that detect a backward pass. These are the nodes nearest to the states of a layer.
_NODES_NEARBY = 16


class GraphOfCall:
    """Autograd graph of one call, with a record of whether a backward pass has freed it.

    Args:
        outputs: outputs of the call.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._freed = False
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(self._visit)
                metadata: Any = output.grad_fn.metadata  # torch declares `metadata` as a method
                metadata[_CALL] = self

    def ends_at(self, node: Any) -> bool:
        """True if a node computes an output of this call."""
        call: object = node.metadata.get(_CALL)
        return call is self

    def _visit(self, gradients: Any) -> None:
        self._freed |= not keeps_graph()

    def watch(self, states: Sequence[Tensor]) -> None:
        """Makes a later backward pass raise a clear error if the gradient reaches `states` and the graph is freed."""
        for state in states:
            if state.grad_fn is not None and not state.is_leaf:
                state.register_hook(partial(GraphOfCall._check, self))

    def _check(self, gradient: Tensor) -> None:
        if self._freed and _is_freed(current_node()):
            raise FreedGraphError


def graph_of(outputs: Sequence[Tensor]) -> GraphOfCall | None:
    """Returns the graph of a call outside of compilers; `None` for a call without a graph or in a transform."""
    if not torch.is_grad_enabled() or transform_at_work() is not None:
        return None
    return GraphOfCall(outputs) if any(output.grad_fn is not None for output in outputs) else None


class GraphOfStates(GraphOfCall):
    """`GraphOfCall` of a layer whose outputs are unknown. Watches the nodes that computed the layer's new states.

    Args:
        states: states after the call.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        super().__init__(())
        for node in _find_nearest([state.grad_fn for state in states]):
            node.register_prehook(self._visit)


def graph_of_states(states: Sequence[Tensor]) -> GraphOfStates | None:
    """Returns the graph of new states outside of compilers; `None` for states without a graph or in a transform."""
    if not torch.is_grad_enabled() or transform_at_work() is not None:
        return None
    return GraphOfStates(states) if any(state.grad_fn is not None for state in states) else None


def _find_nearest(starts: Sequence[Any]) -> list[Any]:
    """Returns `starts` and the nodes that a gradient reaches next, at most `_NODES_NEARBY`, without leaves."""
    nearest: dict[Any, None] = {}
    pending = deque(starts)
    while pending and len(nearest) < _NODES_NEARBY:
        node = pending.popleft()
        if node is not None and node not in nearest and not hasattr(node, "variable"):
            nearest[node] = None
            pending += [following for following, _ in node.next_functions]
    return list(nearest)


def _is_freed(node: Any) -> bool:
    """True if this node, or a node that a gradient reaches from it, has a saved tensor that was freed."""
    pending, visited = [node], {node}
    while pending and len(visited) < _MOST_NODES:
        current = pending.pop()
        for name in dir(current):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(current, name)
                except RuntimeError as error:
                    if "second time" in str(error):
                        return True
        for following, _ in () if current is None else current.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)
    return False
