"""Splits the tensors of a step into pieces with one value per element.

Some tensors of a step have more dimensions than others. For example, a state `[B, N, K]` and another state `[B, N]`
become K + 1 states `[B, N]`, because a dimension that some results lack consists of cells. A dimension that the step
reduces or multiplies also consists of cells. Dimensions that are too large to be written out are refused. `pieces_of`
returns the pieces of a step's arguments and results. The step on pieces is pointwise, and `in_elements` returns its
graph without the ops that cut and join pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph.cells._parts import Axis
from flexsn_graph.cells._pass import Pass
from flexsn_graph.cells._pieces import Factors, Pieces, StepPieces
from flexsn_graph.cells._values import Dim, Key, OpenAxis, Refined, Spec, Value, shape_of, size_of
from flexsn_graph.errors import NonPointwiseError
from flexsn_graph.ir._layout import LiftedLayout
from flexsn_graph.ir._ops import Op

_prims = torch.ops.prims

_MAX_ATTEMPTS = 256
# The size of the largest dimension that a step may reduce or multiply. All elements of the dimension are written out.
MAX_REDUCED = 16
# The largest number of cells of one value. A small matrix in a product has one cell for each element.
_MAX_STEP_CELLS = 256
_Refinements = dict[Key, tuple[Spec, ...]]


@dataclass(frozen=True, slots=True)
class Elements:
    """A step on elements.

    Attributes:
        module: `[*arguments, *pieces of lifted tensors, *cotangents] -> [*results]`, with pointwise ops and constants.
            Instead of the gradient of a lifted tensor, the results include the gradients of all pieces of the tensor.
        lifted: the pieces of each lifted tensor.
        layouts: the layouts with which the step reads pieces of lifted tensors, by the index of the piece.
        refined: factors of the dimensions of lifted tensors, for the other graphs of the step.
    """

    module: fx.GraphModule
    lifted: tuple[Pieces, ...]
    layouts: dict[int, LiftedLayout]
    refined: Mapping[Key, tuple[Spec, ...]]


class _StepPass(Pass):
    """One attempt to translate a step that cuts and joins its values."""

    supports_arange = True

    def __init__(
        self, module: fx.GraphModule, refined: _Refinements, blamed: dict[Key, fx.Node], *, gradients: bool
    ) -> None:
        super().__init__(module, refined, blamed, gradients, rows=False, max_cells=_MAX_STEP_CELLS)

    def write_out(self, node: fx.Node, dim: Dim) -> None:
        """Raises `Refined` unless a dimension consists of cells.

        Raises:
            NonPointwiseError: the dimension is too large to be written out.
        """
        for factor in dim:
            if isinstance(factor, OpenAxis):
                if size_of(dim) > MAX_REDUCED:
                    raise self.refusal(
                        node,
                        f"{called_op(node)} combines {size_of(dim)} elements of a dimension, but at most {MAX_REDUCED} "
                        "are possible",
                    )
                raise Refined(node, factor, (False, factor.size))

    def sum(self, node: fx.Node, value: Value, dims: Sequence[int], op: Op = _prims.add.default) -> Value:
        if not self._sums_allowed:
            for d in dims:
                self.write_out(node, value.dims[d])
        return super().sum(node, value, dims, op)

    def extreme(self, node: fx.Node, value: Value, dims: Sequence[int], *, largest: bool) -> Value:
        if value.summed:
            raise self.refusal(node, f"{called_op(node)} uses a sum over elements")
        for d in dims:
            self.write_out(node, value.dims[d])
        return self.sum(node, value, dims, _prims.maximum.default if largest else _prims.minimum.default)

    def number_axes(self, dims: Sequence[Dim], numbers: Mapping[Key, int], node: fx.Node) -> tuple[Factors, ...]:
        """The dimensions, with each axis replaced by its number. An axis without a number has to be written out."""
        results = []
        for dim in dims:
            factors: list[Axis | int] = []
            for factor in dim:
                if not isinstance(factor, OpenAxis):
                    factors.append(factor)
                elif self._find_root(factor) in numbers:
                    factors.append(Axis(numbers[self._find_root(factor)]))
                else:
                    self.write_out(node, (factor,))
            results.append(tuple(factors))
        return tuple(results)

    def _number_own_axes(self, value: Value, node: fx.Node) -> Pieces:
        """The pieces of a lifted tensor. The axes of the tensor retain their order."""
        numbers = {self._find_root(axis): number for number, axis in enumerate(value.axes)}
        return Pieces(self.number_axes(value.dims, numbers, node), len(numbers))

    def refusal(self, node: fx.Node, reason: str) -> NonPointwiseError:
        return NonPointwiseError(
            f"{reason}. A step may reduce, multiply, cut and join dimensions of up to {MAX_REDUCED} elements per "
            "neuron, such as branches [B, N, K] next to a soma [B, N]. It works on all other dimensions element by "
            "element.",
            called_op(node),
            location_of(node),
        )


def pieces_of(module: fx.GraphModule, num_inputs: int, num_states: int, num_outputs: int) -> StepPieces:
    """Finds the pieces of a step's arguments and results.

    Args:
        module: the lowered step with views, cuts and products: `[*inputs, *states, *lifted] -> [*outputs, *states]`.

    Raises:
        NonPointwiseError: the step combines elements in a way that pieces cannot represent.
    """
    refined: _Refinements = {}
    blamed: dict[Key, fx.Node] = {}
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _Cut(module, refined, blamed, gradients=False).find_pieces(num_inputs, num_states, num_outputs)
        except Refined as refinement:
            refined[refinement.key], blamed[refinement.key] = refinement.factors, refinement.node
    raise AssertionError("the factors of the dimensions are not found")


class _Cut(_StepPass):
    def find_pieces(self, num_inputs: int, num_states: int, num_outputs: int) -> StepPieces:
        output, _ = self.translate()
        entries: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        values = [self.value(entry) for entry in entries]
        states = self._inputs[num_inputs : num_inputs + num_states]
        for entry, before, after in zip(entries[num_outputs:], states, values[num_outputs:], strict=True):
            for dim, new_dim in zip(before.dims, after.dims, strict=True):
                self._find_common(entry, dim, new_dim)
        self._unite_samples(values)
        self._check_distinct()
        axes_of_results = [{self._find_root(a) for a in value.axes} for value in values]
        common = set.intersection(*axes_of_results)
        if not common and any(axes_of_results):
            shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(map(shape_of, entries)))
            raise self.refusal(
                entries[0],
                f"outputs and states of the step have different shapes, {shapes}, with no dimension in common",
            )
        for entry, value in zip(entries, values, strict=True):
            for axis in value.axes:
                if self._find_root(axis) not in common:
                    self._write_out_result(entry, axis)
            if value.dims and any(not isinstance(factor, OpenAxis) for factor in value.dims[0]):
                raise self.refusal(entry, "the step combines elements of its first dimension, the samples of a batch")
        numbers = {self._find_root(axis): number for number, axis in enumerate(values[0].axes)}
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        arguments = [
            Pieces(self.number_axes(value.dims, numbers, node), len(numbers))
            for node, value in zip(placeholders, self._inputs[: num_inputs + num_states], strict=False)
        ]
        results = [
            Pieces(self.number_axes(value.dims, numbers, entry), len(numbers))
            for entry, value in zip(entries, values, strict=True)
        ]
        lifted = zip(placeholders[len(arguments) :], self._inputs[len(arguments) :], strict=True)
        return StepPieces(
            tuple(arguments[:num_inputs]),
            tuple(arguments[num_inputs:]),
            tuple(results[:num_outputs]),
            tuple(self._number_own_axes(value, node) for node, value in lifted),
        )

    def _unite_samples(self, values: Sequence[Value]) -> None:
        """Unites the first dimensions of all results, the samples of a batch, if the dimensions have equal sizes."""
        first = [value.dims[0][0] for value in values if value.dims and len(value.dims[0]) == 1]
        axes = [axis for axis in first if isinstance(axis, OpenAxis)]
        if len(axes) == len(values) and len({axis.size for axis in axes}) == 1:
            for axis in axes[1:]:
                self._unite(axes[0], axis)

    def _write_out_result(self, node: fx.Node, axis: OpenAxis) -> None:
        if axis.size > MAX_REDUCED:
            raise self.refusal(
                node,
                f"outputs and states of the step have different shapes: one has a dimension of {axis.size} elements "
                f"that others lack, but such a dimension may have at most {MAX_REDUCED}",
            )
        raise Refined(node, axis, (False, axis.size))


def in_elements(
    module: fx.GraphModule,
    step_shape: Sequence[int],
    lifted: Sequence[int | None],
    gradient_of: Sequence[int | None],
    forward_refined: Mapping[Key, tuple[Spec, ...]] | None = None,
) -> Elements:
    """Turns a step on pieces into a step on elements. Each piece has the shape `[*step]`.

    Args:
        module: the lowered step with views, cuts and products.
        step_shape: shape of one step.
        lifted: for each placeholder, the index of its lifted tensor, or `None`.
        gradient_of: for each result, the index of the placeholder whose gradient the result is, or `None`.
        forward_refined: for a VJP, the `refined` of the forward graph.

    Raises:
        NonPointwiseError: the step combines elements.
    """
    refined: _Refinements = dict(forward_refined or {})
    blamed: dict[Key, fx.Node] = {}
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _OnElements(module, refined, blamed, step_shape, lifted, gradient_of).find_elements()
        except Refined as refinement:
            refined[refinement.key], blamed[refinement.key] = refinement.factors, refinement.node
    raise AssertionError("the factors of the dimensions are not found")


class _OnElements(_StepPass):
    def __init__(
        self,
        module: fx.GraphModule,
        refined: _Refinements,
        blamed: dict[Key, fx.Node],
        step_shape: Sequence[int],
        lifted: Sequence[int | None],
        gradient_of: Sequence[int | None],
    ) -> None:
        super().__init__(module, refined, blamed, gradients=any(place is not None for place in gradient_of))
        self._shape = tuple(step_shape)
        self._lifted, self._gradient_of = lifted, gradient_of
        # The step's axes have the smallest keys, so each of them is the root of all axes with which it is united.
        self._step_axes = [OpenAxis((axis - len(self._shape),), size) for axis, size in enumerate(self._shape)]

    def _add_placeholder(self, node: fx.Node) -> tuple[Value, list[Any]]:
        value, cell_dims = super()._add_placeholder(node)
        if self._lifted[len(self._inputs)] is None:
            cut_nodes = [cut_node for key, cut_node in self._blamed.items() if key[0] in self._axes_of_inputs[-1]]
            self._unite_with_step(cut_nodes[-1] if cut_nodes else node, value)
        return value, cell_dims

    def _unite_with_step(self, node: fx.Node, value: Value) -> None:
        """Unites the dimensions of an argument or a result with the dimensions of the step."""
        missing = len(self._step_axes) - len(value.dims)
        for d, dim in enumerate(value.dims):
            if not dim:
                continue
            (factor, *others) = dim
            if others or missing + d < 0 or not isinstance(factor, OpenAxis) or factor.size != self._shape[missing + d]:
                raise self.refusal(node, f"{called_op(node)} combines elements of the step")
            self._unite(factor, self._step_axes[missing + d])

    def find_elements(self) -> Elements:
        output, _ = self.translate()
        entries: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        varying = {axis.key for axis in self._step_axes if axis.size > 1}
        results: list[fx.Node] = []
        for entry, position in zip(entries, self._gradient_of, strict=True):
            value = self.value(entry)
            index = None if position is None else self._lifted[position]
            if index is not None:
                assert position is not None
                results += self._list_gradient_terms(entry, value, self._inputs[position], varying)
                continue
            self._unite_with_step(entry, value)
            if position is not None:
                self._check_gradient(entry, value, varying)
            elif value.summed and not value.zero:
                raise self.refusal(entry, f"{called_op(entry)} sums over elements of the step")
            results.append(value.nodes[int(value.cells)])
        self._check_distinct()
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[node] for node in results))
        pieces, layouts = self._find_lifted_pieces()
        of_lifted = zip(self._axes_of_inputs, self._lifted, strict=True)
        lifted_numbers = {number for numbers, index in of_lifted if index is not None for number in numbers}
        refined = {key: specs for key, specs in self._refined.items() if key[0] in lifted_numbers}
        return Elements(fx.GraphModule({}, graph), pieces, layouts, refined)

    def _list_gradient_terms(
        self, node: fx.Node, value: Value, lifted_value: Value, varying: set[Key]
    ) -> list[fx.Node]:
        """The nodes that compute the terms of a lifted tensor's gradient, one node for each piece of the tensor."""
        for dim, gradient_dim in zip(lifted_value.dims, value.dims, strict=True):
            if dim and gradient_dim:
                self._find_common(node, dim, gradient_dim)
        self._check_gradient(node, value, varying)
        return [value.nodes[i] for i in value.cells.reshape(-1).tolist()]

    def _check_gradient(self, node: fx.Node, value: Value, varying: set[Key]) -> None:
        if not value.zero and {self._find_root(axis) for axis in (*value.axes, *value.summed)} != varying:
            # Gradients are summed over the step later. The sum would count each element of this gradient several times.
            raise self.refusal(
                node, f"{called_op(node)} gives a gradient that is not a sum over the elements that share its tensor"
            )

    def _find_lifted_pieces(self) -> tuple[tuple[Pieces, ...], dict[int, LiftedLayout]]:
        numbers = {axis.key: number for number, axis in enumerate(self._step_axes)}
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        pieces: list[Pieces] = []
        layouts: dict[int, LiftedLayout] = {}
        count = 0
        for node, value, index in zip(placeholders, self._inputs, self._lifted, strict=True):
            if index is None:
                continue
            pieces.append(self._number_own_axes(value, node))
            read_cells = [i for i, new in enumerate(value.nodes) if new.users]
            if read_cells:
                self.number_axes(value.dims, numbers, next(iter(node.users)))  # may raise `Refined`
                axis_numbers = [numbers[self._find_root(axis)] for axis in value.axes]
                layout = LiftedLayout(_compute_strides(value.axes, axis_numbers, len(numbers)), 0)
                layouts.update((count + i, layout) for i in read_cells)
            count += len(value.nodes)
        return tuple(pieces), layouts


def _compute_strides(axes: Sequence[OpenAxis], numbers: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stride of a contiguous tensor along each axis of the step. It is 0 along axes that the tensor lacks.

    Args:
        axes: the axes of the tensor.
        numbers: for each of the given axes, its number among the step's axes.
        rank: the number of the step's axes.
    """
    strides, stride = [0] * rank, 1
    for axis, number in zip(reversed(axes), reversed(numbers), strict=True):
        strides[number] = stride
        stride *= axis.size
    return tuple(strides)
