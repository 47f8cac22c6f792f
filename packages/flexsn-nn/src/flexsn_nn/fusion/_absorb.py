"""Moves the functions that compute a scan's inputs into the scan's step, in a Dynamo graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from flexsn_nn._affine import Affine
from flexsn_nn._batch_affine import graph_affine
from flexsn_nn._dynamo_graphs import example, is_scan
from flexsn_nn.fusion._pointwise import describe, reads_form
from flexsn_nn.fusion._producers import Constant, ElementwiseCall, Expression, Norm, Producers, Sequence, parts
from flexsn_nn.fusion._report import Absorbed, LeftProducer


def absorb_producers(module: fx.GraphModule) -> tuple[list[Absorbed], list[LeftProducer]]:
    """Moves the producers of the scans' inputs into the scans' steps, in place.

    Returns the functions that were moved, and the functions that were not moved.
    """
    absorbed: list[Absorbed] = []
    left: dict[fx.Node, str] = {}
    norms: dict[fx.Node, list[fx.Node]] = {}
    scans = [_ScanNode(module, node, norms) for node in module.graph.nodes if is_scan(node)]
    for scan in scans:
        absorbed += scan.absorb()
        left |= scan.left
    for norm, affine in norms.items():
        if norm.users:  # another scan reads the norm, and the statistics must be updated only once
            with module.graph.inserting_after(affine[-1]):
                normalised = module.graph.call_function(_normalize, (norm.args[0], *affine))
            normalised.meta = dict(norm.meta)
            norm.replace_all_uses_with(normalised)
        module.graph.erase_node(norm)
    if absorbed:
        module.graph.lint()
        module.recompile()
    return absorbed, [LeftProducer(describe(node), reason) for node, reason in left.items()]


def _normalize(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return Affine(mean, scale, shift).of(x)


class _ScanNode:
    """One scan, and the functions that compute its inputs in the original graph.

    Args:
        norms: norms that steps already compute, each with its nodes of mean, scale and shift.
    """

    def __init__(self, module: fx.GraphModule, node: fx.Node, norms: dict[fx.Node, list[fx.Node]]) -> None:
        self.module, self.node, self.norms = module, node, norms
        core, num_inputs, num_states, _, *tensors = node.args
        assert isinstance(core, fx.Node)
        assert isinstance(num_inputs, int)
        assert isinstance(num_states, int)
        self.step: fx.GraphModule = getattr(module, str(core.target))
        self.num_inputs = num_inputs
        self.other_operands: list[Any] = tensors[num_inputs:]
        producers = Producers(node)
        self.expressions = [producers.of(operand) for operand in tensors[:num_inputs] if isinstance(operand, fx.Node)]
        assert len(self.expressions) == num_inputs
        self.left = producers.left
        # Placeholders of the new step, by operand.
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.captured: dict[fx.Node, fx.Node] = {}
        self.views: dict[Sequence, fx.Node] = {}
        self.squeezed: dict[fx.Node, fx.Node] = {}

    def absorb(self) -> list[Absorbed]:
        """Replaces the scan and its step if the step can compute at least one producer. Returns the moved functions."""
        expressions = self.expressions
        moved = [[p.node for p in parts(e) if isinstance(p, ElementwiseCall | Norm)] for e in expressions]
        if not any(moved):
            return []
        for expression in expressions:
            for part in parts(expression):
                if isinstance(part, Norm):
                    self._split_norm(part.node)
        step, operands, captured = self._build_step(expressions)
        name = f"{self.node.name}_step"
        self.module.add_submodule(name, step)
        graph = self.module.graph
        _, _, num_states, num_outputs, *_ = self.node.args
        core = self.node.args[0]
        with graph.inserting_before(self.node):
            new_core = graph.get_attr(name)
            arguments = (new_core, len(operands), num_states, num_outputs, *operands, *self.other_operands, *captured)
            new = graph.call_function(self.node.target, arguments, dict(self.node.kwargs))  # type: ignore[arg-type]
        new.meta = dict(self.node.meta)
        self.node.replace_all_uses_with(new)
        graph.erase_node(self.node)
        assert isinstance(core, fx.Node)
        if not core.users:
            graph.erase_node(core)
        for expression, nodes in zip(expressions, moved, strict=True):
            self._erase_nodes(expression, nodes)
        return [Absorbed(new.name, tuple(map(describe, nodes))) for nodes in moved if nodes]

    # -- the graph around the scan ---------------------------------------------------------------------------

    def _split_norm(self, norm: fx.Node) -> None:
        """Replaces a norm by the computation of its statistics."""
        if norm in self.norms:
            return
        graph = self.module.graph
        with graph.inserting_before(norm):
            affine = graph.call_function(graph_affine, norm.args, norm.kwargs)
            self.norms[norm] = [graph.call_function(operator.getitem, (affine, i)) for i in range(3)]

    def _get_operand(self, sequence: Sequence) -> fx.Node:
        """Returns the node of a sequence, after the view if the sequence has a view."""
        if sequence.view is None:
            return sequence.node
        if sequence not in self.views:
            view = sequence.view
            with self.module.graph.inserting_before(view):
                self.views[sequence] = self.module.graph.call_method(
                    str(view.target), (sequence.node, *view.args[1:]), dict(view.kwargs)
                )
        return self.views[sequence]

    def _erase_nodes(self, expression: Expression, nodes: list[fx.Node]) -> None:
        """Erases the nodes that have no readers.

        Before that, nodes that read only the form of a node, and not its values, are redirected to another sequence.
        """
        graph = self.module.graph
        views = [part.view for part in parts(expression) if isinstance(part, Sequence) and part.view is not None]
        remaining = set(graph.nodes)
        for node in dict.fromkeys((*views, *reversed(nodes))):
            if node not in remaining:
                continue
            if node.users and all(map(reads_form, node.users)):
                self._redirect_readers(node, expression)
            if not node.users and node not in self.norms:
                graph.erase_node(node)

    def _redirect_readers(self, node: fx.Node, expression: Expression) -> None:
        tensor = example(node)
        assert tensor is not None
        for part in parts(expression):
            if isinstance(part, Sequence) and part.like.shape == tensor.shape:
                operand = self._get_operand(part)
                for user in list(node.users):
                    if str(user.target).startswith("new_"):
                        user.kwargs = {"dtype": tensor.dtype, **user.kwargs}
                    user.replace_input_with(node, operand)
                return

    # -- the step --------------------------------------------------------------------------------------------

    def _build_step(self, expressions: list[Expression]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
        """Builds the step with its producers. Returns the step, its inputs, and the additional captured tensors."""
        graph = fx.Graph()
        operands = dict.fromkeys(
            self._get_operand(part) for e in expressions for part in parts(e) if isinstance(part, Sequence)
        )
        self.inputs = {node: graph.placeholder(f"sequence_{i}") for i, node in enumerate(operands)}
        placeholders = [node for node in self.step.graph.nodes if node.op == "placeholder"]
        new_nodes = {node: graph.placeholder(node.name) for node in placeholders[self.num_inputs :]}
        constants = dict.fromkeys(node for e in expressions for part in parts(e) for node in self._list_constants(part))
        self.captured = {node: graph.placeholder(f"constant_{i}") for i, node in enumerate(constants)}
        for placeholder, expression in zip(placeholders, expressions, strict=False):
            new_nodes[placeholder] = self._emit(graph, expression)
        results = graph.graph_copy(self.step.graph, new_nodes)
        graph.output(results)
        return fx.GraphModule(self.step, graph), list(operands), list(constants)

    def _list_constants(self, part: Expression) -> list[fx.Node]:
        if isinstance(part, Norm):
            return self.norms[part.node]
        if not isinstance(part, Constant):
            return []
        return [self._squeeze(part.node) if part.squeezed else part.node]

    def _squeeze(self, node: fx.Node) -> fx.Node:
        if node not in self.squeezed:
            with self.module.graph.inserting_before(self.node):
                self.squeezed[node] = self.module.graph.call_method("squeeze", (node, 0))
        return self.squeezed[node]

    def _emit(self, graph: fx.Graph, expression: Expression) -> fx.Node:
        """Emits the nodes of an expression for one time step."""
        if isinstance(expression, Sequence):
            return self.inputs[self._get_operand(expression)]
        if isinstance(expression, Constant):
            return self.captured[self._list_constants(expression)[0]]
        if isinstance(expression, Norm):
            affine = [self.captured[node] for node in self.norms[expression.node]]
            return graph.call_function(_normalize, (self._emit(graph, expression.x), *affine))
        args = tuple(self._emit_argument(graph, value) for value in expression.args)
        kwargs = {key: self._emit_argument(graph, value) for key, value in expression.kwargs.items()}
        call: Callable[..., fx.Node] = graph.call_method if expression.node.op == "call_method" else graph.call_function
        return call(expression.node.target, args, kwargs)

    def _emit_argument(self, graph: fx.Graph, value: Any) -> Any:
        return self._emit(graph, value) if isinstance(value, Expression) else value
