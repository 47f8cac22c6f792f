"""Warnings for a module in two places of a network, where the second call continues from the state of the first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from flexsn_hop.callers import warn
from flexsn_nn._freed_graphs import GraphOfCall
from flexsn_nn.errors import SharedStateWarning

# Maximum number of nodes that a search in a graph visits; a step of a loop has a few dozen nodes.
_MOST_NODES = 4096


def feeds_itself(inputs: Sequence[Tensor], states: Sequence[Tensor], graph: GraphOfCall | None) -> bool:
    """True if the autograd graph of a call's inputs contains an output of the previous call.

    Args:
        inputs: inputs of the call.
        states: states at the beginning of the call. In kernels, one node computes both states and outputs.
        graph: graph of the previous call; `None` unless that call ran as a loop.
    """
    ends = {state.grad_fn for state in states if state.grad_fn is not None}
    pending = deque(x.grad_fn for x in inputs if x.grad_fn is not None)
    visited: set[Any] = set()
    while ends and pending and len(visited) < _MOST_NODES:
        node = pending.popleft()
        if node in ends or (graph is not None and graph.ends_at(node)):
            return True
        if node not in visited:
            visited.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
    return False


def warn_of_sharing(module: nn.Module) -> None:
    """Warns, once for each module, that the module is in two places of a network."""
    if module.__dict__.get("_warned_of_sharing"):
        return
    module.__dict__["_warned_of_sharing"] = True
    warn(
        f"one {type(module).__name__} is in two places of a network, and the second place continues with the state "
        "of the first: give each place its own instance, or reset the instance between the two calls.",
        SharedStateWarning,
    )


def check_sequences(net: nn.Module, kinds: Collection[type[nn.Module]]) -> None:
    """Warns of modules of these kinds that run more than once in one call of an `nn.Sequential`.

    Only `nn.Sequential` is checked, because another module may have two names for a child, and use only one of these
    names to call the child.
    """
    for part in net.modules():
        if type(part) is nn.Sequential:
            for module, calls in _count_calls(part).items():
                if calls > 1 and isinstance(module, tuple(kinds)):
                    warn_of_sharing(module)


def _count_calls(part: nn.Module) -> Counter[nn.Module]:
    """Counts the calls of each module in one call of `part`, which may be an `nn.Sequential`."""
    if type(part) is not nn.Sequential:
        return Counter([part])
    counts: Counter[nn.Module] = Counter()
    for child in part._modules.values():
        if child is not None:
            counts += _count_calls(child)
    return counts
