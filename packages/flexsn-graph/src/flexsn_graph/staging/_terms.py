"""Finds the terms of captured tensors' gradients, which are sums over time of single values or of products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph.errors import UnsupportedCoreError
from flexsn_graph.ir._ops import SUM_OP, is_zero
from flexsn_graph.ir._products import PRODUCTS, Call, call_of, convolution_weight, is_linear_in_one
from flexsn_graph.staging._staged_step import Term, View
from flexsn_graph.staging._views import differs

_aten = torch.ops.aten
_prims = torch.ops.prims


class SumsOverTime:
    """The sums over time for gradients of captured tensors, and the linear operations on these sums after the loop.

    Args:
        stored: the values that have a place in memory, including values that are added later.
        moving: the values of the step.
        view: maps a node to a view of a value that has a place.
        fixed: maps an argument that is computed from captured tensors alone to a value that is equal in all steps.
    """

    def __init__(
        self,
        stored: Collection[fx.Node],
        moving: Collection[fx.Node],
        view: Callable[[fx.Node], View],
        fixed: Callable[[Any], Any],
    ) -> None:
        self._ports, self._moving = stored, moving
        self._view, self._fixed = view, fixed
        self._sums: list[tuple[int, fx.Node, tuple[Call, ...]]] = []

    def add(self, lifted: int, gradient: fx.Node) -> list[fx.Node]:
        """Adds the gradient of a lifted tensor. Returns the values that a step has to store.

        Raises:
            UnsupportedCoreError: a part of the gradient depends on captured tensors alone.
        """
        leaves: list[fx.Node] = []
        for leaf, calls in self._list_summands(gradient):
            if leaf not in self._moving:
                if is_zero(leaf):
                    continue
                raise UnsupportedCoreError(
                    f"the gradient of a captured tensor does not depend on the step ({called_op(leaf)}): an "
                    "autograd.Function returns a constant. Multiply it by the gradient that its backward receives.",
                    called_op(leaf),
                    location_of(leaf),
                )
            self._sums.append((lifted, leaf, calls))
            leaves += self._find_factors(leaf) or [leaf]
        return leaves

    def list_terms(self) -> Iterator[Term]:
        """The terms. All values that the terms read must already have places."""
        for lifted, leaf, calls in self._sums:
            factors = self._find_factors(leaf)
            if factors:
                target: Any = leaf.target
                numbers = leaf.args[2:] if target is convolution_weight else ()
                yield Term(lifted, target, tuple(self._view(f) for f in factors), calls, tuple(numbers))
            else:
                yield Term(lifted, None, (self._view(leaf),), calls)

    def _list_summands(self, node: fx.Node) -> list[tuple[fx.Node, tuple[Call, ...]]]:
        """A gradient as a list of summands: values that are summed over time, each with the linear ops on its sum."""
        results: list[tuple[fx.Node, tuple[Call, ...]]] = []
        waiting: list[tuple[fx.Node, tuple[Call, ...]]] = [(node, ())]
        while waiting:
            node, calls = waiting.pop()
            if node in self._ports or self._find_factors(node) or not self._is_from_sum(node):
                results.append((node, calls))
            elif node.target is _prims.add.default:
                waiting += [(a, calls) for a in node.args if isinstance(a, fx.Node)]
            else:
                source = self._find_linear_source(node)
                assert source is not None
                waiting.append((source, (*self._list_calls(source, node), *calls)))
        return results

    def _find_linear_source(self, node: fx.Node) -> fx.Node | None:
        """The value of the step in which a node is linear, or `None`. Captured tensors may be factors of the node.

        For example, the core may multiply one captured matrix by a mask or by another captured matrix before use.
        """
        if is_linear_in_one(node):
            return node.all_input_nodes[0]
        moving = [a for a in node.args if isinstance(a, fx.Node) and a in self._moving]
        if len(moving) != 1 or len(node.args) != 2:
            return None
        is_first = node.args[0] is moving[0]
        target: Any = node.target
        linear = target in (_prims.mul.default, _aten.mm.default) or (target is _prims.div.default and is_first)
        return moving[0] if linear else None

    def _list_calls(self, value: fx.Node, node: fx.Node) -> tuple[Call, ...]:
        """The linear ops that lead from a value to a node."""
        if is_linear_in_one(node):
            return (call_of(node),)
        target: Any = node.target
        is_first = node.args[0] is value
        fixed = self._fixed(node.args[1 if is_first else 0])
        if is_first or target is _prims.mul.default:
            return ((target, (fixed,), {}),)
        turn: Call = (_aten.t.default, (), {})
        turned = View(fixed.source, (turn,), fixed.shape[::-1], fixed.dtype)
        return turn, (target, (turned,), {}), turn

    def _is_from_sum(self, node: fx.Node) -> bool:
        """True if linear ops lead to the node from a sum over elements or from a product of two values.

        These ops run after the loop.
        """
        while node not in self._ports and node.target is not SUM_OP:
            source = self._find_linear_source(node)
            if source is None:
                break
            node = source
        if node.target is SUM_OP and node not in self._ports:
            return True
        if node.target is _prims.add.default and not any(differs(a, node) for a in node.args):
            return any(self._is_from_sum(a) for a in node.all_input_nodes)
        return bool(self._find_factors(node))

    def _find_factors(self, node: fx.Node) -> list[fx.Node]:
        """The factors of a product of two values of the step, such as a matrix's gradient. `[]` for other nodes."""
        target: Any = node.target
        facts = PRODUCTS.get(target)
        if target is convolution_weight:
            factors: list[Any] = list(node.args[:2])
        elif facts is None or facts.added is not None or node in self._ports:
            return []
        else:
            factors = [node.args[position] for position in facts.factors]
        results = [f for f in factors if isinstance(f, fx.Node) and f in self._moving]
        return results if len(results) == 2 else []
