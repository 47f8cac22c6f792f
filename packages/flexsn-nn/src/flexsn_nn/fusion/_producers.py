"""Represents the producers of a scan's inputs, in a Dynamo graph, as expressions that the scan's step can compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from flexsn_nn._dynamo_graphs import example, is_scan, is_written
from flexsn_nn.fusion._pointwise import forgets_versions, is_pointwise, reads_form, separates

_VIEWS = ("reshape", "view", "unflatten")


@dataclass(frozen=True, slots=True)
class Sequence:
    """An operand `[T, *step]`: an input of the step.

    Attributes:
        node: node whose result has the operand's elements.
        view: view of frames `[T * B, ...]` as `[T, B, ...]` that has to be applied to `node`; `None` if no view is
            needed.
    """

    node: fx.Node
    view: fx.Node | None = None

    @property
    def like(self) -> Tensor:
        """Example tensor with the operand's shape and dtype, without values."""
        tensor = example(self.view or self.node)
        assert tensor is not None
        return tensor


@dataclass(frozen=True, slots=True)
class Constant:
    """An operand that does not change from step to step: a captured tensor.

    Attributes:
        squeezed: True if the operand's first dimension is 1 instead of T, and has to be removed.
    """

    node: fx.Node
    squeezed: bool = False


@dataclass(frozen=True, slots=True)
class ElementwiseCall:
    """A call of an elementwise function.

    Attributes:
        args, kwargs: arguments of the node, in which expressions replace nodes.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Norm:
    """The affine part of a batch norm; `x` is the norm's input."""

    node: fx.Node
    x: Expression


Expression = Sequence | Constant | ElementwiseCall | Norm


def parts(expression: Expression) -> Iterator[Expression]:
    """Yields all parts of an expression, from the innermost part to the expression itself."""
    if isinstance(expression, ElementwiseCall):
        for value in (*expression.args, *expression.kwargs.values()):
            if isinstance(value, Expression):
                yield from parts(value)
    elif isinstance(expression, Norm):
        yield from parts(expression.x)
    yield expression


@dataclass(slots=True)
class Producers:
    """Finds the expressions of one scan's inputs.

    Args:
        scan: node of the scan.

    Attributes:
        left: reasons why elementwise functions and norms remain outside of the step, by node.
    """

    scan: fx.Node
    left: dict[fx.Node, str] = field(default_factory=dict)
    # Nodes whose value could differ if they were evaluated at the position of the scan.
    _immovable: frozenset[fx.Node] = frozenset()

    def __post_init__(self) -> None:
        nodes = list(self.scan.graph.nodes)
        end = nodes.index(self.scan)
        if any(map(forgets_versions, nodes)):
            self._immovable = frozenset(nodes)
            return
        last = max((i for i, node in enumerate(nodes[:end]) if not is_scan(node) and separates(node)), default=-1)
        self._immovable = frozenset(nodes[: last + 1])

    def of(self, node: fx.Node) -> Expression:
        """Returns the expression of an input `[T, *step]`: a `Sequence` if the step cannot compute this input."""
        tensor = example(node)
        if tensor is None or tensor.dim() < 2:  # type promotion treats steps without dimensions differently
            return Sequence(node)
        return self._find_expression(node, self.scan, None)

    def _find_expression(self, node: fx.Node, reader: fx.Node, view: fx.Node | None) -> Expression:
        leaf = Sequence(node, view)
        if view is None and _is_unfolding(node) and not is_written(node):
            frames = node.args[0]
            assert isinstance(frames, fx.Node)
            producer = self._find_expression(frames, node, node) if self._is_read_by(node, reader) else leaf
            return leaf if isinstance(producer, Sequence) else producer
        expression: Expression | None = None
        if is_pointwise(node):
            expression = self._find_call(node, view)
        elif node.target is nn.functional.batch_norm and node.args and isinstance(node.args[0], fx.Node):
            x = self._find_expression(node.args[0], node, view)
            # The computation of the norm's statistics, outside of the step, also reads the norm's input.
            expression = Norm(node, x if len(_list_sequences(x)) == 1 else Sequence(node.args[0], view))
        if expression is None:
            return leaf
        if node in self._immovable:
            return self._note_reason(
                leaf, "after it, autocast or no_grad ends, or a tensor that it may read is changed"
            )
        written = [
            part.node
            for part in parts(expression)
            if not isinstance(part, ElementwiseCall | Norm) and is_written(part.node)
        ]
        if written or is_written(node):
            return self._note_reason(leaf, "it, or a tensor that it reads, is changed in place")
        if not self._is_read_by(node, reader) and (
            isinstance(expression, Norm) or len(_list_sequences(expression)) > 1
        ):
            return self._note_reason(leaf, "another node reads its result, so the result is written in any case")
        return expression

    def _find_call(self, node: fx.Node, view: fx.Node | None) -> ElementwiseCall | None:
        """Returns the expression of an elementwise node; `None` if the step cannot compute this node.

        Each operand must be a sequence of T floating-point steps, or must not depend on time.
        """
        result = example(node)
        if result is None or result.dim() < 2:
            return None
        operands: dict[fx.Node, Expression] = {}
        for operand in node.all_input_nodes:
            tensor = example(operand)
            assert tensor is not None
            if tensor.dim() < result.dim():
                operands[operand] = Constant(operand)
            elif _is_equal(tensor.shape[0], 1) and not _is_equal(result.shape[0], 1):
                operands[operand] = Constant(operand, squeezed=view is None)
            elif not _is_equal(tensor.shape[0], result.shape[0]) or (view is not None and tensor.shape != result.shape):
                return None
            else:
                operands[operand] = self._find_expression(operand, node, view)
        # One sequence must have the full shape of the result, because the step's shape is derived from the sequences.
        full_shape = result.shape if view is None else Sequence(node, view).like.shape
        sequences = [sequence for expression in operands.values() for sequence in _list_sequences(expression)]
        if not any(sequence.like.shape == full_shape for sequence in sequences):
            return None
        if not all(sequence.like.dtype.is_floating_point for sequence in sequences):
            return None
        args = tuple(operands[value] if isinstance(value, fx.Node) else value for value in node.args)
        kwargs = {key: operands[value] if isinstance(value, fx.Node) else value for key, value in node.kwargs.items()}
        return ElementwiseCall(node, args, kwargs)

    def _is_read_by(self, node: fx.Node, reader: fx.Node) -> bool:
        """True if only `reader` and scans read the values of a node."""
        return all(user is reader or is_scan(user) or reads_form(user) for user in node.users)

    def _note_reason(self, leaf: Sequence, reason: str) -> Sequence:
        self.left[leaf.node] = reason
        return leaf


def _list_sequences(expression: Expression) -> set[Sequence]:
    return {part for part in parts(expression) if isinstance(part, Sequence)}


def _is_equal(size: Any, other: Any) -> bool:
    """True if two sizes are known to be equal. Adds no guards."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    return bool(str(size) == str(other))


def _is_unfolding(node: fx.Node) -> bool:
    """True if a node is a view of `[T * B, ...]` as `[T, B, ...]`."""
    if node.op != "call_method" or node.target not in _VIEWS:
        return False
    before, after = example(node.args[0]), example(node)
    if before is None or after is None or after.dim() != before.dim() + 1 or before.dim() < 2:
        return False
    return all(_is_equal(a, b) for a, b in zip(before.shape[1:], after.shape[2:], strict=True))
