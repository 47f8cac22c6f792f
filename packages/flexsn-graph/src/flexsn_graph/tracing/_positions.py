"""Maps the elements of each value to elements of the step and of the captured tensors.

A kernel processes one position of the step at a time. A kernel can omit all views of a lowered graph, and all sums of a
backward formula, if the result does not change. This module proves that the result does not change, or refuses the
graph. Each value is described by strided tensors without data: one for the step, and one for each captured tensor on
which the value depends. These tensors have the value's shape. For each element of the value, the strides define the
position in the step, or the element of the captured tensor, to which the element corresponds. A stride of 0 marks a
dimension along which the value does not vary. Views of the value are replayed on these tensors. For example, in a step
of shape `[B, C]`, a value of shape `[C, 1]` with strides `(1, 0)` in the step varies along the step's second axis.

The gradient of an argument that broadcasts is a sum over axes of the step. The kernel omits this sum. The caller of the
kernel computes the sum once, from the gradient that was accumulated over time. The gradient does not change if all
operations after the sum are linear in the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph.errors import CaptureError, NonPointwiseError, TwoLayoutsError
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.ir._ops import (
    ALIAS_OPS,
    EMPTY_OPS,
    FILL_OPS,
    RESHAPE_OPS,
    SUM_OP,
    TERMS,
    UNIFORM,
    facts_of,
    is_pointwise,
)
from flexsn_graph.lowering._strides import StepAxes, broadcast_shapes, contiguous, drop_dims, is_compatible, numel
from flexsn_graph.tracing._refusals import refuse_without_rule

# The key of the step in `_Value.reads`. All other keys are indices of lifted tensors.
_STEP = -1


@dataclass(frozen=True, slots=True)
class _Value:
    shape: tuple[int, ...]
    reads: Mapping[int, Tensor] = field(default_factory=dict)
    summed: frozenset[int] = frozenset()  # axes of the step over which the value is summed
    zero: bool = False  # True if the value is 0 for all arguments


_Values: TypeAlias = _Value | tuple[_Value, ...]


def check_positions(
    graph: fx.Graph,
    step_shape: Sequence[int],
    lifted: Sequence[int | None],
    gradient_of: Sequence[int | None],
    forward_layouts: Mapping[int, LiftedLayout],
    *,
    sums_allowed: bool = False,
) -> dict[int, LiftedLayout]:
    """Proves that `graph` works on each element of the step separately.

    Args:
        graph: the lowered graph, with views.
        step_shape: shape of one step.
        lifted: for each placeholder, the index of its lifted tensor, or `None`.
        gradient_of: for each result, the index of the placeholder whose gradient the result is, or `None`. If any
            result is a gradient, sums are allowed.
        forward_layouts: layouts of lifted tensors in another graph of the step, by index. `graph` must read these
            tensors in the same layouts.
        sums_allowed: True to allow sums in any case, because `graph` computes gradients and returns their terms.

    Returns:
        The layout of each lifted tensor that is read.

    Raises:
        NonPointwiseError: an op mixes elements of the step, or a sum cannot be computed after the scan.
        CaptureError: a lifted tensor is read in two layouts, or in a layout that no strides express.
    """
    return _Check(tuple(step_shape), lifted, gradient_of, forward_layouts, sums_allowed).run(graph)


class _Check:
    def __init__(
        self,
        step_shape: tuple[int, ...],
        lifted: Sequence[int | None],
        gradient_of: Sequence[int | None],
        forward_layouts: Mapping[int, LiftedLayout],
        sums_allowed: bool,
    ) -> None:
        self._step = StepAxes(step_shape)
        self._lifted = lifted
        self._gradient_of = gradient_of
        self._sums_allowed = sums_allowed or any(position is not None for position in gradient_of)
        self._values: dict[fx.Node, _Values] = {}
        self._moved: fx.Node | None = None
        self._forward_layouts = forward_layouts
        self._layouts: dict[int, LiftedLayout] = {}

    def run(self, graph: fx.Graph) -> dict[int, LiftedLayout]:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node, index in zip(placeholders, self._lifted, strict=True):
            shape = _get_shape(node)
            if index is not None:
                self._values[node] = _Value(shape, {index: contiguous(shape)})
                continue
            user = _find_first_use(node)
            if user is not None and not self._step.reaches(shape):
                raise self._refusal(
                    user,
                    f"{called_op(user)} uses an argument of shape {list(shape)}, which does not broadcast to "
                    f"the step's {list(self._step.shape)}",
                )
            self._values[node] = _Value(shape, {_STEP: self._step.place(shape)})
        for node in graph.nodes:
            if node.op == "get_attr":
                self._values[node] = _Value(_get_shape(node))
            elif node.op == "call_function":
                self._values[node] = self._evaluate(node)
            elif node.op == "output":
                results = [(entry, self._get_value(entry)) for entry in node.args[0]]
                for (entry, value), position in zip(results, self._gradient_of, strict=True):
                    if position is None:
                        self._finish_result(value, entry)
                    elif not value.zero and numel(self._step.shape) > 0:  # if the step is empty, nothing is summed
                        self._finish_gradient(value, entry, position)
        return self._layouts

    # Values of nodes.

    def _get_value(self, node: fx.Node) -> _Value:
        value = self._values[node]
        assert isinstance(value, _Value), f"{node} has several results"
        return value

    def _evaluate(self, node: fx.Node) -> _Values:
        target: Any = node.target
        if target in FILL_OPS:
            position = FILL_OPS[target]
            number = 0 if position is None else node.args[position]
            return _Value(_get_shape(node), zero=isinstance(number, bool | int | float) and number == 0)
        if target in EMPTY_OPS:
            return _Value(_get_shape(node))
        if target is operator.getitem:
            source = self._values[node.all_input_nodes[0]]
            return source[node.args[1]] if isinstance(source, tuple) else source  # type: ignore[index]
        if target in (TERMS, UNIFORM):
            # The code that inserts these ops guarantees that no element moves. See `traces/_pointwise.py`.
            return _Value(_get_shape(node), {_STEP: self._step.place(_get_shape(node))})
        if target in ALIAS_OPS:
            return self._evaluate_view(node)
        if target is SUM_OP:
            return self._evaluate_sum(node)
        if is_pointwise(target):
            return self._evaluate_pointwise(node)
        refuse_without_rule(node)
        operands = [self._values[operand] for operand in node.all_input_nodes]
        in_step = any(isinstance(value, _Value) and _STEP in value.reads for value in operands)
        raise self._refusal(node, f"{called_op(node)} does not work element by element", in_any_step=in_step)

    def _evaluate_view(self, node: fx.Node) -> _Values:
        value = self._get_value(node.all_input_nodes[0])
        try:
            moved = {index: _replay(node, strided) for index, strided in value.reads.items()}
        except RuntimeError as error:
            raise self._refusal(node, f"{called_op(node)} has no strides here ({error})") from None
        results = node.meta["val"]
        if isinstance(results, Tensor):
            self._check_view(node, value, _get_shape(node), moved.get(_STEP))
            return _Value(_get_shape(node), moved, value.summed, value.zero)
        for part, result in enumerate(results):
            step = moved.get(_STEP)
            self._check_view(node, value, tuple(result.shape), step and step[part])
        return tuple(
            replace(
                value,
                shape=tuple(result.shape),
                reads={index: strided[part] for index, strided in moved.items()},
            )
            for part, result in enumerate(results)
        )

    def _check_view(self, node: fx.Node, value: _Value, after: tuple[int, ...], step: Tensor | None) -> None:
        before = value.shape
        if value.summed and numel(after) != numel(before):
            raise self._sum_refusal(node)
        if step is None:
            return
        if not is_compatible(step, self._step.place(after)):
            # An error names the first such node. If a later view moves the elements back, there is no error.
            self._moved = self._moved or node
        if numel(after) < numel(before):
            raise self._refusal(node, f"{called_op(node)} selects only some of the step's elements")

    def _evaluate_pointwise(self, node: fx.Node) -> _Value:
        operands = [self._get_value(operand) for operand in node.args if isinstance(operand, fx.Node)]
        shape = _get_shape(node)
        expanded = broadcast_shapes([operand.shape for operand in operands])
        if expanded != shape:
            raise self._refusal(node, f"{called_op(node)} turns {list(expanded or ())} into {list(shape)}")
        summed = self._find_summed_axes(node, operands)
        reads: dict[int, Tensor] = {}
        for operand in operands:
            for index, strided in operand.reads.items():
                strided = strided if operand.shape == shape else strided.expand(shape)
                existing = reads.get(index)
                reads[index] = strided if existing is None else self._merge(index, existing, strided, node)
        return _Value(shape, reads, summed, _is_zero(node, operands))

    def _merge(self, index: int, strided: Tensor, other: Tensor, node: fx.Node) -> Tensor:
        pairs = list(zip(strided.shape, strided.stride(), other.stride(), strict=True))
        is_same = all(size <= 1 or a == b for size, a, b in pairs)
        if is_same and strided.storage_offset() == other.storage_offset():
            return strided
        if index != _STEP:
            raise self._two_layouts_error(index, node)
        if not all(size <= 1 or a == b or 0 in (a, b) for size, a, b in pairs):
            raise self._moved_refusal(node)
        return torch.empty_strided(strided.shape, [max(a, b) for _, a, b in pairs], device="meta")

    # Sums.

    def _evaluate_sum(self, node: fx.Node) -> _Value:
        value = self._get_value(node.all_input_nodes[0])
        dims: Any = node.args[1]
        after = _get_shape(node)
        if numel(value.shape) == 0:  # a sum over no elements
            return _Value(after, zero=True)
        if all(value.shape[d] == 1 for d in dims) or value.zero:
            reads = {i: drop_dims(strided, dims) for i, strided in value.reads.items()}
            return _Value(after, {} if value.zero else reads, value.summed, value.zero)
        if not self._sums_allowed:
            raise self._refusal(node, f"{called_op(node)} sums over elements")
        step = value.reads.get(_STEP)
        summed_axes = frozenset(
            a for d in dims if step is not None and value.shape[d] > 1 for a in self._step.axes_of(step, d)
        )
        if step is None or numel([self._step.shape[a] for a in summed_axes]) != numel([value.shape[d] for d in dims]):
            raise self._refusal(node, f"{called_op(node)} sums a value that is the same for all elements")
        self._record_layouts(value, step, node)
        return _Value(after, {_STEP: drop_dims(step, dims)}, value.summed | summed_axes)

    def _find_summed_axes(self, node: fx.Node, operands: Sequence[_Value]) -> frozenset[int]:
        """The axes over which the op's result is summed. Refuses ops that are not linear in a sum."""
        axes = {operand.summed for operand in operands if operand.summed}
        if not axes:
            return frozenset()
        facts = facts_of(node.target)
        summed = {i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and self._get_value(a).summed}
        # The op must be jointly linear in a set of arguments that contains all sums, and the rest of the set must be 0.
        linear = facts is not None and any(
            summed <= together and all(self._vanishes(node.args[i]) for i in together - summed)
            for together in facts.linear
        )
        # A result with more elements than a sum would contain the sum several times.
        grows = any(o.summed and numel(o.shape) != numel(_get_shape(node)) for o in operands)
        if len(axes) > 1 or not linear or grows or not _is_float(node):
            raise self._sum_refusal(node)
        return next(iter(axes))

    def _vanishes(self, argument: Any) -> bool:
        return self._get_value(argument).zero if isinstance(argument, fx.Node) else argument == 0

    # Results.

    def _finish_result(self, value: _Value, node: fx.Node) -> None:
        positions = self._step.place(value.shape)
        step = value.reads.get(_STEP)
        if value.summed or (step is not None and not is_compatible(step, positions)):
            raise self._moved_refusal(node)
        self._record_layouts(value, positions, node)

    def _finish_gradient(self, value: _Value, node: fx.Node, position: int) -> None:
        index = self._lifted[position]
        step = value.reads.get(_STEP)
        positions = self._step.place(value.shape)
        owner = f"argument number {position}" if index is None else f"captured tensor number {index}"
        if index is not None:
            # An element of the gradient belongs to the element of the tensor at the same index.
            positions = torch.empty((), device="meta") if step is None else step
            value = replace(value, reads={**value.reads, index: contiguous(value.shape)})
        elif step is not None and not is_compatible(step, positions):
            raise self._moved_refusal(node)
        axes = {axis for d in range(positions.dim()) for axis in self._step.axes_of(positions, d)}
        if axes | value.summed != self._step.varying:
            # The caller's sum would count a gradient that elements of the step share once for each of these elements.
            raise self._refusal(node, f"the gradient of {owner} is not a sum over the elements that share it")
        self._record_layouts(value, positions, node)

    def _record_layouts(self, value: _Value, step: Tensor, node: fx.Node) -> None:
        """Records the layouts in which `value`, whose elements are at the positions `step`, reads lifted tensors."""
        for index, strided in value.reads.items():
            if index != _STEP:
                layout = self._step.layout(step, strided)
                if layout is None:
                    raise CaptureError(
                        f"{called_op(node)} reads a captured tensor in a layout that has no strides in the step. "
                        "Reshape it outside of the core.",
                        called_op(node),
                        location_of(node),
                    )
                before = self._layouts.setdefault(index, self._forward_layouts.get(index, layout))
                if layout != before:
                    raise self._two_layouts_error(index, node)

    # Errors.

    def _refusal(self, node: fx.Node, reason: str, *, in_any_step: bool = False) -> NonPointwiseError:
        error = NonPointwiseError(
            f"{reason}: a step function must work on each element of the step by itself. Do this outside of the core.",
            called_op(node),
            location_of(node),
        )
        error._in_any_step = in_any_step
        return error

    def _moved_refusal(self, node: fx.Node) -> NonPointwiseError:
        blamed = self._moved or node
        return self._refusal(blamed, f"{called_op(blamed)} moves elements of the step")

    def _sum_refusal(self, node: fx.Node) -> NonPointwiseError:
        return NonPointwiseError(
            f"a backward formula reduces a gradient and then uses it in {called_op(node)}. Only sums to the shape of "
            "a captured tensor or of an argument without dimensions, and linear operations on such sums, are "
            "supported there.",
            called_op(node),
            location_of(node),
        )

    def _two_layouts_error(self, index: int, node: fx.Node) -> TwoLayoutsError:
        return TwoLayoutsError(
            f"captured tensor number {index} is read in two different layouts in one step. Outside of "
            "the core, make a separate tensor for the second layout.",
            called_op(node),
            location_of(node),
        )


def _replay(node: fx.Node, strided: Tensor) -> Any:
    target: Any = node.target
    if target in RESHAPE_OPS:
        return strided.view(_get_shape(node))
    return target(strided, *node.args[1:], **node.kwargs)


def _find_first_use(node: fx.Node) -> fx.Node | None:
    """The first op that the core applies to a value, after the tracer's `detach`. `None` for an unused value."""
    for user in node.users:
        first_use = _find_first_use(user) if user.target is torch.ops.aten.detach.default else user
        if first_use is not None:
            return first_use
    return None


def _is_zero(node: fx.Node, operands: Sequence[_Value]) -> bool:
    """True if an op is jointly linear in all of its operands, and all operands are 0."""
    facts = facts_of(node.target)
    values = {i for i, argument in enumerate(node.args) if isinstance(argument, fx.Node | bool | int | float)}
    all_zero = len(values) == len(operands) and all(operand.zero for operand in operands)
    return all_zero and facts is not None and values in facts.linear


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _get_shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()
