"""One attempt to translate a graph on tensors, node by node, into a graph on the elements of a step."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph._torch_private import FakeTensor
from flexsn_graph.cells._parts import Axis, CellModule, CellResult, Cells, CutModule, Dimension, Part
from flexsn_graph.cells._registry import RULES
from flexsn_graph.cells._values import (
    Dim,
    Factor,
    Key,
    OpenAxis,
    Refined,
    Spec,
    Value,
    counts_of,
    num_values,
    number_of,
    shape_of,
    size_of,
    with_chosen,
)
from flexsn_graph.errors import NonPointwiseError
from flexsn_graph.ir._ops import ALIAS_OPS, EMPTY_OPS, FILL_OPS, ROW_MAX, ROW_MIN, ROW_SUM, Op, facts_of, is_pointwise
from flexsn_graph.tracing._refusals import refuse_without_rule

MAX_CELLS = 64
# Reductions of rows up to this length are written out as operations on cells.
_SHORT_ROW = 8

_prims = torch.ops.prims


class Pass:
    supports_arange = False  # True if `arange` creates one cell for each number

    def __init__(
        self,
        module: fx.GraphModule,
        refined: Mapping[Key, tuple[Spec, ...]],
        blamed: Mapping[Key, fx.Node],
        sums_allowed: bool,
        rows: bool,
        max_cells: int = MAX_CELLS,
    ) -> None:
        self._module = module
        self._max_cells = max_cells
        self._rows = rows
        self._row: OpenAxis | None = None  # the axis that ops reduce
        self._refined = refined
        self._blamed = blamed
        self._sums_allowed = sums_allowed
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        self._parents: dict[Key, Key] = {}
        self._num_axes = 0
        self._inputs: list[Value] = []
        self._axes_of_inputs: list[range] = []  # for each input, the numbers with which its axes' keys begin
        # Axes that must be distinct. They are checked at the end of the pass, after all equal axes have been united.
        self._distinct: list[tuple[fx.Node, list[OpenAxis]]] = []
        self._zeros: dict[torch.dtype, fx.Node] = {}

    def run(self) -> CutModule:
        output, arguments = self.translate()
        self._check_distinct()
        return self._finish(output, arguments)

    def translate(self) -> tuple[fx.Node, list[list[Any]]]:
        """Translates all nodes. Returns the output node and, for each argument, the dimensions of each of its cells."""
        nodes = list(self._module.graph.nodes)
        arguments: list[list[Any]] = []
        for node in nodes:
            if node.op == "placeholder":
                value, cell_dims = self._add_placeholder(node)
                self._values[node] = value
                self._inputs.append(value)
                arguments.append(cell_dims)
            elif node.op == "get_attr":
                self._values[node] = self._read_constant(node)
            elif node.op == "call_function":
                result = self._call(node)
                self._values[node] = result
                for entry in result if isinstance(result, tuple) else (result,):
                    self._distinct.append((node, [*entry.axes, *entry.summed]))
        (output,) = (n for n in nodes if n.op == "output")
        return output, arguments

    # -- axes ----------------------------------------------------------------------------------------------

    def _new_dim(self, size: int) -> Dim:
        self._num_axes += 1
        return self._expand_factors(OpenAxis((self._num_axes,), size)) if size != 1 else ()

    def _expand_factors(self, axis: OpenAxis) -> Dim:
        specs = self._refined.get(axis.key)
        if specs is None:
            return (axis,)
        results: list[Factor] = []
        for i, (is_axis, size) in enumerate(specs):
            results += self._expand_factors(OpenAxis((*axis.key, i), size)) if is_axis else (size,)
        return tuple(results)

    def _find_root(self, axis: OpenAxis) -> Key:
        key = axis.key
        while key in self._parents:
            key = self._parents[key]
        return key

    def _unite(self, axis: OpenAxis, other: OpenAxis) -> None:
        first, second = sorted((self._find_root(axis), self._find_root(other)))
        if first != second:
            self._parents[second] = first

    def _check_distinct(self) -> None:
        for node, axes in self._distinct:
            roots = [self._find_root(a) for a in axes]
            if len(set(roots)) != len(roots):
                raise self.refusal(node, f"{called_op(node)} mixes elements of different positions")

    # -- values --------------------------------------------------------------------------------------------

    def _add_placeholder(self, node: fx.Node) -> tuple[Value, list[Any]]:
        first_number = self._num_axes + 1
        dims = tuple(self._new_dim(size) for size in node.meta["val"].shape)
        counts = counts_of(dims)
        self._axes_of_inputs.append(range(first_number, self._num_axes + 1))
        cut_keys = [key for key in self._blamed if key[0] in self._axes_of_inputs[-1]]
        self._limit(self._blamed[cut_keys[-1]] if cut_keys else node, counts)
        index = len(self._inputs)
        new_nodes, cell_dims = [], []
        for flat in range(math.prod(counts)):
            new = self._graph.placeholder(f"input_{index}_{flat}")
            new.meta["val"] = node.meta["val"]
            new_nodes.append(new)
            cell_dims.append(with_chosen(dims, flat, counts))
        return Value(dims, torch.arange(math.prod(counts)).view(counts), tuple(new_nodes)), cell_dims

    def _read_constant(self, node: fx.Node) -> Value:
        tensor = getattr(self._module, str(node.target))
        if isinstance(tensor, FakeTensor) or not isinstance(tensor, Tensor) or tensor.numel() > MAX_CELLS:
            raise self.refusal(node, "the function creates a constant that is not a small tensor")
        dims: tuple[Dim, ...] = tuple((size,) if size > 1 else () for size in tensor.shape)
        nodes = tuple(self._add_number(v, tensor) for v in tensor.flatten().tolist())
        return Value(dims, torch.arange(len(nodes)).view(counts_of(dims)), nodes)

    def from_numbers(self, node: fx.Node, values: Sequence[bool | int | float]) -> Value:
        """A value with one cell for each number of a small table."""
        self._limit(node, [len(values)])
        dims: tuple[Dim, ...] = ((len(values),) if len(values) > 1 else (),)
        nodes = tuple(self._add_number(value, node.meta["val"]) for value in values)
        return Value(dims, torch.arange(len(nodes)).view(counts_of(dims)), nodes)

    def _add_number(self, value: bool | int | float, like: Tensor) -> fx.Node:
        node = self._graph.call_function(_prims.scalar_tensor.default, (value,), {"dtype": like.dtype})
        node.meta["val"] = like
        return node

    def _get_zero(self, like: Tensor) -> fx.Node:
        if like.dtype not in self._zeros:
            self._zeros[like.dtype] = self._add_number(0, like)
        return self._zeros[like.dtype]

    def value(self, node: fx.Node) -> Value:
        value = self._values[node]
        assert isinstance(value, Value), f"{node} has several results"
        return value

    def _limit(self, node: fx.Node, counts: Sequence[int]) -> None:
        if math.prod(counts) > self._max_cells:
            raise self.refusal(
                node,
                f"{called_op(node)} cuts a tensor into {math.prod(counts)} pieces, but at most {self._max_cells} are "
                "possible",
            )

    # -- ops -----------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Value | tuple[Value, ...]:
        target: Any = node.target
        if target is operator.getitem:
            source = self._values[node.all_input_nodes[0]]
            assert isinstance(source, tuple)
            return source[node.args[1]]  # type: ignore[index]
        if target in FILL_OPS or target in EMPTY_OPS:
            return self._fill(node)
        rule = RULES.get(target)
        if rule is not None:
            return rule(self, node, *node.args, **node.kwargs)  # type: ignore[no-any-return]
        if target in ALIAS_OPS:
            return self._regroup(node, self.value(node.all_input_nodes[0]), shape_of(node))
        if is_pointwise(target):
            return self._pointwise(node)
        refuse_without_rule(node)
        raise self.refusal(node, f"{called_op(node)} does not work element by element")

    def _fill(self, node: fx.Node) -> Value:
        target: Any = node.target
        dims = tuple(self._new_dim(size) for size in shape_of(node))
        zero = False
        if target in EMPTY_OPS:
            new = self._graph.node_copy(node, lambda n: n)
        else:
            position = FILL_OPS[target]
            number: Any = 0 if position is None else node.args[position]
            if isinstance(number, fx.Node):
                return replace(self.value(number), dims=dims)
            new, zero = self._add_number(number, node.meta["val"]), number == 0
        counts = counts_of(dims)
        self._limit(node, counts)
        return Value(dims, torch.zeros(counts, dtype=torch.int64), (new,), zero=zero)

    def _pointwise(self, node: fx.Node) -> Value | tuple[Value, ...]:
        args = [self.value(a) if isinstance(a, fx.Node) else a for a in node.args]
        result = self._apply(node, node.target, args, node.meta["val"], node.kwargs)
        first_result = result[0] if isinstance(result, tuple) else result
        if tuple(size_of(d) for d in first_result.dims) != shape_of(node):
            raise self.refusal(node, f"{called_op(node)} mixes elements")
        return result

    def _apply(
        self, node: fx.Node, target: Any, args: Sequence[Any], like: Any, kwargs: Mapping[str, Any] | None = None
    ) -> Value | tuple[Value, ...]:
        """Applies an op element by element to values and numbers. `like` is the fake result, or a tuple of them."""
        operands = {i: a for i, a in enumerate(args) if isinstance(a, Value)}
        dims, aligned = self._align(node, list(operands.values()))
        counts = counts_of(dims)
        self._limit(node, counts)
        summed = self._find_summed_axes(node, target, args, like)
        expanded = [cells.expand(counts).flatten().tolist() for cells in aligned]
        # Cells with the same operands share one node.
        index_by_cells: dict[tuple[int, ...], int] = {}
        new_nodes: list[fx.Node] = []
        order = []
        for chosen in zip(*expanded, strict=True):
            if chosen not in index_by_cells:
                index_by_cells[chosen] = len(new_nodes)
                operand_nodes = iter(o.nodes[c] for o, c in zip(operands.values(), chosen, strict=True))
                new = self._graph.call_function(
                    target, tuple(next(operand_nodes) if isinstance(a, Value) else a for a in args), dict(kwargs or {})
                )
                new.meta["val"], new.stack_trace = like, node.stack_trace
                new_nodes.append(new)
            order.append(index_by_cells[chosen])
        cells = torch.tensor(order).view(counts)
        facts = facts_of(target)
        in_all = facts is not None and frozenset(operands) in facts.linear and len(operands) == num_values(args)
        zero = in_all and all(o.zero for o in operands.values())
        if isinstance(like, Tensor):
            wide = None
            if summed and target is _prims.convert_element_type.default:
                wide = operands[0].wide or operands[0]
            return Value(dims, cells, tuple(new_nodes), summed, zero, wide)
        parts = []
        for i, part_like in enumerate(like):
            part_nodes = []
            for source_node in new_nodes:
                new = self._graph.call_function(operator.getitem, (source_node, i))
                new.meta["val"], new.stack_trace = part_like, node.stack_trace
                part_nodes.append(new)
            parts.append(Value(dims, cells, tuple(part_nodes), summed))
        return tuple(parts)

    def apply_prim(self, node: fx.Node, op: str, *args: Any, dtype: torch.dtype) -> Value:
        """Applies a prim that has a single result. The result has the dtype `dtype`."""
        like = torch.empty((), dtype=dtype, device="meta")
        if op == "convert_element_type":
            args = (*args, dtype)
        result = self._apply(node, getattr(_prims, op).default, args, like)
        assert isinstance(result, Value)
        return result

    def _find_summed_axes(self, node: fx.Node, target: Any, args: Sequence[Any], like: Any) -> frozenset[OpenAxis]:
        """The axes that remain to be summed in the result. Refuses ops that are not linear in a sum."""
        operands = {i: a for i, a in enumerate(args) if isinstance(a, Value)}
        sums = {i: o.summed for i, o in operands.items() if o.summed}
        if not sums:
            return frozenset()
        facts = facts_of(target)
        first = next(iter(sums.values()))
        is_same = all({self._find_root(a) for a in s} == {self._find_root(a) for a in first} for s in sums.values())
        linear = facts is not None and any(
            set(sums) <= together
            and all(operands[i].zero if i in operands else i < len(args) and args[i] == 0 for i in together - set(sums))
            for together in facts.linear
        )
        if not is_same or not linear or not like.is_floating_point():
            raise self.refusal(node, f"{called_op(node)} uses a sum over elements")
        for operand in operands.values():
            self._distinct.append((node, [*operand.axes, *first]))
        return first

    # -- dimensions ----------------------------------------------------------------------------------------

    def _align(self, node: fx.Node, values: Sequence[Value]) -> tuple[tuple[Dim, ...], list[Tensor]]:
        """The common dimensions of the values, and the cells of each value, with size 1 where a value is broadcast."""
        rank = max((len(v.dims) for v in values), default=0)
        padded = [((),) * (rank - len(v.dims)) + v.dims for v in values]
        dims = []
        for column in zip(*padded, strict=True):
            present = [d for d in column if d]
            common_dim: Dim = present[0] if present else ()
            for other in present[1:]:
                common_dim = self._find_common(node, common_dim, other)
            dims.append(common_dim)
        cells = []
        for value, padded_dims in zip(values, padded, strict=True):
            sizes: list[int] = []
            for dim, common in zip(padded_dims, dims, strict=True):
                sizes += counts_of([common]) if dim else [1] * len(counts_of([common]))
            cells.append(value.cells.reshape(sizes))
        return tuple(dims), cells

    def _find_common(self, node: fx.Node, dim: Dim, other: Dim) -> Dim:
        """The common factors of two factorizations of a dimension. Unites equal axes, or raises `Refined`."""
        left, right, result = list(dim), list(other), []
        while left and right:
            a, b = left[0], right[0]
            size, requested = (f.size if isinstance(f, OpenAxis) else f for f in (a, b))
            if size == requested:
                if isinstance(a, OpenAxis) and isinstance(b, OpenAxis):
                    self._unite(a, b)
                elif isinstance(a, OpenAxis):
                    raise Refined(node, a, (False, size))
                elif isinstance(b, OpenAxis):
                    raise Refined(node, b, (False, size))
                result.append(a)
                del left[0], right[0]
                continue
            larger, small, sequence = (a, requested, left) if size > requested else (b, size, right)
            large = max(size, requested)
            if large % small:
                raise self.refusal(node, f"{called_op(node)} combines pieces of different sizes")
            if isinstance(larger, OpenAxis):
                raise Refined(node, larger, (True, small), (True, large // small))
            sequence[:1] = [small, large // small]
        return tuple(result)

    def _regroup(self, node: fx.Node, value: Value, shape: Sequence[int]) -> Value:
        """Computes `view`: groups the factors into other dimensions and retains their order."""
        if math.prod(shape) != math.prod(size_of(d) for d in value.dims):
            raise self.refusal(node, f"{called_op(node)} selects only some of the elements")
        factors = list(value.factors)
        dims: list[Dim] = []
        for size in shape:
            dim: list[Factor] = []
            while size_of(dim) < size:
                missing = size // size_of(dim)
                factor = factors.pop(0)
                factor_size = factor.size if isinstance(factor, OpenAxis) else factor
                if factor_size > missing:
                    if size % size_of(dim) or factor_size % missing:
                        raise self.refusal(node, f"{called_op(node)} moves elements")
                    if isinstance(factor, OpenAxis):
                        raise Refined(node, factor, (True, missing), (True, factor_size // missing))
                    factor, rest = missing, factor_size // missing
                    factors.insert(0, rest)
                elif missing % factor_size or size % size_of(dim):
                    raise self.refusal(node, f"{called_op(node)} moves elements")
                dim.append(factor)
            dims.append(tuple(dim))
        return replace(value, dims=tuple(dims), cells=value.cells.reshape(counts_of(dims)), wide=None)

    def permute(self, node: fx.Node, value: Value, order: Sequence[int]) -> Value:
        dims = tuple(value.dims[d] for d in order)
        positions, at = [], 0
        for dim in value.dims:
            count = len(counts_of([dim]))
            positions.append(list(range(at, at + count)))
            at += count
        return replace(value, dims=dims, cells=value.cells.permute([p for d in order for p in positions[d]]), wide=None)

    def expand(self, node: fx.Node, value: Value) -> Value:
        shape = shape_of(node)
        padded = ((),) * (len(shape) - len(value.dims)) + value.dims
        dims = tuple(d or self._new_dim(size) for d, size in zip(padded, shape, strict=True))
        sizes: list[int] = []
        for dim, new in zip(padded, dims, strict=True):
            sizes += counts_of([new]) if dim else [1] * len(counts_of([new]))
        self._limit(node, counts_of(dims))
        return replace(value, dims=dims, cells=value.cells.reshape(sizes).expand(counts_of(dims)), wide=None)

    def _split_leading(self, node: fx.Node, dim: Dim, unit: int) -> tuple[int, Dim]:
        """Splits a dimension into `(cells, rest)`, so that the rest has `unit` elements."""
        count, rest = 1, list(dim)
        while size_of(rest) > unit:
            factor = rest[0]
            if isinstance(factor, OpenAxis):
                inside = size_of(rest[1:])
                # The size of the part of the axis that lies within one piece.
                inner_size = unit // inside if unit % inside == 0 else 1
                inner_size = inner_size if factor.size % inner_size == 0 else 1
                raise Refined(node, factor, (False, factor.size // inner_size), (True, inner_size))
            within = size_of(rest) // factor
            if within >= unit:
                count *= factor
                del rest[0]
            else:
                if unit % within or factor % (unit // within):
                    raise self.refusal(node, f"{called_op(node)} cuts pieces of different sizes")
                count *= factor // (unit // within)
                rest[0] = unit // within
        if size_of(rest) != unit:
            raise self.refusal(node, f"{called_op(node)} cuts pieces of different sizes")
        return count, tuple(rest)

    def _split_trailing(self, node: fx.Node, dim: Dim, step: int) -> tuple[Dim, int]:
        """Splits a dimension into `(rest, step)`. The last factor has `step` elements and consists of cells."""
        result, rest = 1, list(dim)
        while result < step:
            factor = rest[-1]
            missing = step // result
            size = factor.size if isinstance(factor, OpenAxis) else factor
            if step % result or (size % missing and missing % size):
                raise self.refusal(node, f"{called_op(node)} takes one of every {step} elements of {size_of(dim)}")
            taken = min(size, missing)
            if isinstance(factor, OpenAxis):
                raise Refined(node, factor, (True, size // taken), (False, taken))
            rest[-1:] = [size // taken] if size > taken else []
            result *= taken
        return tuple(rest), step

    def _with_dim(self, value: Value, dim: int, factors: Dim) -> Value:
        """The value with new factors for one dimension. The new factors group the same cells."""
        dims = (*value.dims[:dim], factors, *value.dims[dim + 1 :])
        return replace(value, dims=dims, cells=value.cells.reshape(counts_of(dims)), wide=None)

    def _find_cell_axis(self, value: Value, dim: int) -> int:
        """The first dimension of `value.cells` that belongs to the dimension `dim` of the value."""
        return len(counts_of(value.dims[:dim]))

    def slice(self, node: fx.Node, value: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        dim %= len(value.dims)
        size = size_of(value.dims[dim])
        start, end = (max(0, min(size, p + size if p < 0 else p)) for p in (start, end))
        count = max(0, -(-(end - start) // step))
        if count == size:
            return value
        if count == 0:
            raise self.refusal(node, f"{called_op(node)} selects no elements")
        if step > 1 and count * step == size and start < step:
            rest, cells = self._split_trailing(node, value.dims[dim], step)
            value = self._with_dim(value, dim, (*rest, cells))
            at = self._find_cell_axis(value, dim) + len(counts_of([rest]))
            return replace(
                value, dims=(*value.dims[:dim], rest, *value.dims[dim + 1 :]), cells=value.cells.select(at, start)
            )
        unit = math.gcd(size, start, end) if step == 1 else 1
        num_cells, rest = self._split_leading(node, value.dims[dim], unit)
        value = self._with_dim(value, dim, (num_cells, *rest))
        at = self._find_cell_axis(value, dim)
        selected = value.cells[(slice(None),) * at + (slice(start // unit, end // unit, step),)]
        num_selected = selected.shape[at]
        lead: Dim = (num_selected,) if num_selected > 1 else ()
        dims = (*value.dims[:dim], (*lead, *rest), *value.dims[dim + 1 :])
        return replace(value, dims=dims, cells=selected.reshape(counts_of(dims)))

    def cat(self, node: fx.Node, values: Sequence[Value], dim: int) -> Value:
        dim %= len(values[0].dims)
        sums = {frozenset(self._find_root(a) for a in v.summed) for v in values if not v.zero}
        if len(sums) > 1:
            raise self.refusal(node, f"{called_op(node)} joins sums with values that are not sums")
        unit = math.gcd(*(size_of(v.dims[dim]) for v in values))
        split = [self._split_leading(node, v.dims[dim], unit) for v in values]
        split_values = [self._with_dim(v, dim, (n, *rest)) for v, (n, rest) in zip(values, split, strict=True)]
        # The dimensions have to agree, except for the leading cells.
        remainders = [replace(v, dims=(*v.dims[:dim], v.dims[dim][1:], *v.dims[dim + 1 :])) for v in split_values]
        dims = remainders[0].dims
        for other in remainders[1:]:
            dims = tuple(
                self._find_common(node, a, b) if a and b else a or b for a, b in zip(dims, other.dims, strict=True)
            )
        if any(tuple(map(size_of, v.dims)) != tuple(map(size_of, dims)) for v in remainders):
            raise self.refusal(node, f"{called_op(node)} joins tensors of different shapes")
        nodes: list[fx.Node] = []
        tables = []
        for value, (num_cells, _) in zip(split_values, split, strict=True):
            counts = [*counts_of(dims[:dim]), num_cells, *counts_of(dims[dim:])]
            tables.append(value.cells.reshape(counts) + len(nodes))
            nodes += value.nodes
        cells = torch.cat(tables, len(counts_of(dims[:dim])))
        total = sum(num_cells for num_cells, _ in split)
        joined = (*dims[:dim], (*((total,) if total > 1 else ()), *dims[dim]), *dims[dim + 1 :])
        self._limit(node, counts_of(joined))
        first = next((v for v in values if not v.zero), values[0])
        zero = all(v.zero for v in values)
        return Value(joined, cells.reshape(counts_of(joined)), tuple(nodes), first.summed, zero)

    def _zeros_like(self, value: Value, dim: int, size: int, like: Tensor) -> Value:
        """Zeros in the shape of `value`, with `size` elements in the dimension that `cat` joins."""
        dims = (*value.dims[:dim], self._new_dim(size), *value.dims[dim + 1 :])
        counts = counts_of(dims)
        return Value(dims, torch.zeros(counts, dtype=torch.int64), (self._get_zero(like),), value.summed, zero=True)

    def put(self, node: fx.Node, value: Value, dim: int, start: int, end: int, step: int, size: int) -> Value:
        """Computes `slice_backward`: `value` at the positions of a slice, and zeros elsewhere.

        Args:
            size: size of the result's dimension `dim`.
        """
        like = node.meta["val"]
        dim %= len(value.dims)
        start, end = (max(0, min(size, p + size if p < 0 else p)) for p in (start, end))
        count = size_of(value.dims[dim])
        if step > 1:
            if count * step != size:
                raise self.refusal(node, f"{called_op(node)} takes one of every {step} elements of {size}")
            unsqueezed = self.unsqueeze(value, dim + 1)
            pieces = [self._zeros_like(unsqueezed, dim + 1, 1, like)] * step
            pieces[start] = unsqueezed
            joined = self.cat(node, pieces, dim + 1)
            return self._regroup(node, joined, shape_of(node))
        parts = [value]
        if start:
            parts.insert(0, self._zeros_like(value, dim, start, like))
        if start + count < size:
            parts.append(self._zeros_like(value, dim, size - start - count, like))
        return self.cat(node, parts, dim) if len(parts) > 1 else value

    def unsqueeze(self, value: Value, dim: int) -> Value:
        return replace(value, dims=(*value.dims[:dim], (), *value.dims[dim:]))

    def sum(self, node: fx.Node, value: Value, dims: Sequence[int], op: Op = _prims.add.default) -> Value:
        """Combines cells in the graph. Sums over axes are computed after the kernel, except for a sum along the row.

        Args:
            op: the op that combines two cells. An addition by default.
        """
        cells, remaining, summed = value.cells, [], set(value.summed)
        at = 0
        tables: list[int] = []
        for number, dim in enumerate(value.dims):
            count = len(counts_of([dim]))
            if number in {d % len(value.dims) for d in dims}:
                summed.update(f for f in dim if isinstance(f, OpenAxis))
                tables += range(at, at + count)
            else:
                remaining.append(dim)
            at += count
        others = [i for i in range(cells.dim()) if i not in tables]
        grouped = cells.permute([*others, *tables]).reshape([*(cells.shape[i] for i in others), -1])
        rows = grouped.reshape(-1, grouped.shape[-1]).tolist()
        totals = []
        for row in rows:
            total = value.nodes[row[0]]
            for cell in row[1:]:
                new = self._graph.call_function(op, (total, value.nodes[cell]))
                new.meta["val"], new.stack_trace = node.meta["val"], node.stack_trace
                total = new
            totals.append(total)
        new_cells = torch.arange(len(totals)).view(grouped.shape[:-1])
        if value.zero:
            summed = set()
        result = Value(tuple(remaining), new_cells, tuple(totals), frozenset(summed), value.zero)
        return self._sum_rows(node, result, value, dims) if summed - value.summed else result

    def _sum_rows(self, node: fx.Node, total: Value, value: Value, dims: Sequence[int]) -> Value:
        """The sum `total`, in which the kernel adds up the row. Other axes remain to be summed after the kernel."""
        if not self._sums_allowed:
            (axis,) = self._find_row_axes(node, value, dims)
        else:
            reduced = {f for d in dims for f in value.dims[d] if isinstance(f, OpenAxis)}
            if (
                self._rows
                and self._find_reduced_dims(value, dims) == [len(value.dims) - 1]
                and self._may_be_row(reduced)
            ):
                self._find_row_axes(node, value, dims)
            row_axes = [
                a for a in reduced if self._row is not None and self._find_root(a) == self._find_root(self._row)
            ]
            if not row_axes:
                return total
            axis = row_axes[0]
        nodes = tuple(self._reduce_row(node, ROW_SUM, total_node, axis.size) for total_node in total.nodes)
        return replace(total, nodes=nodes, summed=total.summed - {axis})

    def _may_be_row(self, axes: Collection[OpenAxis]) -> bool:
        """True if each of the axes can be united with the row.

        Such an axis has the row's size, and no value contains both the axis and the row. For example, an argument that
        is a gradient has an axis that can be united with the row.
        """
        if self._row is None:
            return True
        row = self._find_root(self._row)
        for axis in axes:
            axis_root = self._find_root(axis)
            is_in_one_value = any(
                {row, axis_root} <= {self._find_root(a) for a in distinct} for _, distinct in self._distinct
            )
            if axis.size != self._row.size or (axis_root != row and is_in_one_value):
                return False
        return True

    def _find_row_axes(self, node: fx.Node, value: Value, dims: Sequence[int]) -> list[OpenAxis]:
        """A list with the axis of the reduced row. The list is empty if the row consists of cells.

        Refuses reductions of dimensions other than the last. Raises `Refined` to turn a short row into cells.
        """
        rank, reduced = len(value.dims), self._find_reduced_dims(value, dims)
        if reduced != [rank - 1]:
            which = f"dimension{'s' if len(reduced) > 1 else ''} {', '.join(map(str, reduced))} of {rank}"
            raise self.refusal(
                node, f"{called_op(node)} reduces {which}, but a kernel can only reduce the last dimension"
            )
        axes = [f for f in value.dims[-1] if isinstance(f, OpenAxis)]
        if any(axis.size == 0 for axis in axes):
            raise self.refusal(node, f"{called_op(node)} reduces rows without elements, which kernels cannot do")
        for axis in axes:
            if axis.size <= _SHORT_ROW:
                raise Refined(node, axis, (False, axis.size))
        if len(axes) > 1:
            raise self.refusal(node, f"{called_op(node)} reduces a dimension that is cut into pieces")
        for axis in axes:
            if self._row is not None and self._row.size != axis.size:
                raise self.refusal(
                    node,
                    f"{called_op(node)} reduces rows of {axis.size} elements, but other rows have {self._row.size}",
                )
            if self._row is not None:
                self._unite(self._row, axis)
            self._row = self._row or axis
        return axes

    @staticmethod
    def _find_reduced_dims(value: Value, dims: Sequence[int]) -> list[int]:
        """The dimensions `dims` in ascending order, without dimensions that have one element."""
        rank = len(value.dims)
        return sorted({d % rank for d in dims if size_of(value.dims[d % rank]) != 1})

    def _reduce_row(self, node: fx.Node, op: Op, value: fx.Node, size: int) -> fx.Node:
        """Reduces one value along a row."""
        if value.op == "call_function" and value.target is _prims.scalar_tensor.default:
            number: Any = value.args[0]
            return self._add_number(number * size if op is ROW_SUM else number, value.meta["val"])
        new = self._graph.call_function(op, (value,))
        new.meta["val"], new.stack_trace = value.meta["val"], node.stack_trace
        return new

    def extreme(self, node: fx.Node, value: Value, dims: Sequence[int], *, largest: bool) -> Value:
        """Computes `amax` or `amin`."""
        like = node.meta["val"]
        if value.summed:
            raise self.refusal(node, f"{called_op(node)} uses a sum over elements")
        if all(size_of(value.dims[d]) == 1 for d in dims):
            remaining = tuple(dim for d, dim in enumerate(value.dims) if d not in {n % len(value.dims) for n in dims})
            return replace(value, dims=remaining)
        if not like.dtype.is_floating_point:
            raise self.refusal(node, f"{called_op(node)} reduces {like.dtype}: a kernel reduces floating-point numbers")
        axes = self._find_row_axes(node, value, dims)
        op, of_two = (ROW_MAX, "maximum") if largest else (ROW_MIN, "minimum")
        result = value
        for axis in axes:
            result = replace(
                result, nodes=tuple(self._reduce_row(node, op, operand, axis.size) for operand in result.nodes)
            )
        cells = result.cells.reshape(-1, math.prod(counts_of([value.dims[-1]])))
        remaining_dims = tuple(value.dims[:-1])
        total: Value | None = None
        for column in cells.unbind(1):
            operand = Value(remaining_dims, column.reshape(counts_of(remaining_dims)), result.nodes)
            total = operand if total is None else self.apply_prim(node, of_two, total, operand, dtype=like.dtype)
        assert total is not None
        return total

    # -- results -------------------------------------------------------------------------------------------

    def _finish(self, output: fx.Node, arguments: Sequence[Sequence[Any]]) -> CutModule:
        entries: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        values = [self.value(entry) for entry in entries]
        groups: dict[frozenset[Key], list[int]] = {}
        results: dict[int, CellResult] = {}
        for i, value in enumerate(values):
            constant = number_of(value)
            if constant is not None:
                results[i] = CellResult(-1, self._resolve_result(value, {}), constant)
            else:
                row = () if self._row is None else (self._row,)
                roots = frozenset(self._find_root(a) for a in (*value.axes, *value.summed, *row))
                groups.setdefault(roots, []).append(i)
        parts = [Part(i, p) for i, cell_dims in enumerate(arguments) for p in cell_dims]
        steps = tuple(self._build_step(n, group, values, parts, results) for n, group in enumerate(groups.values()))
        return CutModule(steps, tuple(results[i] for i in range(len(values))), self._find_free_sizes())

    def _build_step(
        self,
        number: int,
        group: Sequence[int],
        values: Sequence[Value],
        parts: Sequence[Part],
        results: dict[int, CellResult],
    ) -> CellModule:
        """The module that computes the results in `group`, which have equal axes."""
        # The axes are in the order of the result with the fewest summed axes. Usually, this result has no summed axes.
        first = min((values[i] for i in group), key=lambda v: len(v.summed))
        axes = [*sorted(first.summed, key=self._find_root), *first.axes]
        if self._row is not None:
            row = self._find_root(self._row)
            axes = [*(a for a in axes if self._find_root(a) != row), self._row]
        numbers = {self._find_root(a): i for i, a in enumerate(axes)}
        nodes, outputs = [], []
        for i in group:
            value = values[i]
            written = value.wide if value.summed and value.wide is not None else value
            for flat, node in enumerate(written.cells.reshape(-1).tolist()):
                cell_dims = with_chosen(value.dims, flat, counts_of(value.dims))
                outputs.append(Part(i, self._resolve(cell_dims, numbers)))
                nodes.append(written.nodes[node])
            summed = tuple(sorted(numbers[self._find_root(a)] for a in value.summed))
            results[i] = CellResult(number, self._resolve_result(value, numbers), None, summed)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[n] for n in nodes))
        inputs = tuple(Part(p.tensor, self._resolve(p.dimensions, numbers)) for p in parts)
        where: list[tuple[int, int] | None] = [None] * len(axes)
        for key, places in self._find_uncut_dimensions().items():
            if key in numbers:
                where[numbers[key]] = places[0]
        sizes = tuple(a.size for a in axes)
        rows = self._row is not None
        return CellModule(fx.GraphModule({}, graph), inputs, tuple(outputs), sizes, tuple(where), rows)

    def _resolve_result(self, value: Value, numbers: Mapping[Key, int]) -> tuple[Dimension, ...]:
        """The dimensions of a result.

        Axes that are not part of the step, such as the axes of a constant, become cells with equal values.
        """
        return tuple(
            tuple(
                Axis(numbers[self._find_root(f)])
                if isinstance(f, OpenAxis) and self._find_root(f) in numbers
                else Cells(f.size if isinstance(f, OpenAxis) else f, 0)
                for f in dim
            )
            for dim in value.dims
        )

    def _resolve(self, dims: Any, numbers: Mapping[Key, int]) -> tuple[Dimension, ...]:
        results = []
        for dim in dims:
            factors: list[Axis | Cells] = []
            for factor in dim:
                if isinstance(factor, OpenAxis):
                    number = numbers.get(self._find_root(factor))
                    # If the step has no such axis, none of its results uses the part.
                    factors.append(Cells(factor.size, 0) if number is None else Axis(number))
                else:
                    factors.append(Cells(*factor))
            results.append(tuple(factors))
        return tuple(results)

    def _find_uncut_dimensions(self) -> dict[Key, list[tuple[int, int]]]:
        """For each axis, the dimensions of arguments that consist of this axis alone."""
        results: dict[Key, list[tuple[int, int]]] = {}
        for index, value in enumerate(self._inputs):
            for d, dim in enumerate(value.dims):
                if len(dim) == 1 and isinstance(dim[0], OpenAxis):
                    results.setdefault(self._find_root(dim[0]), []).append((index, d))
        return results

    def _find_free_sizes(self) -> tuple[tuple[int | None, ...], ...]:
        """For each dimension of each argument, a number that identifies its axis if its size is free, otherwise `None`.

        The size is free if the dimension is one whole axis, and if this axis is not a factor of a dimension that is
        cut.
        """
        dims = [dim for value in self._inputs for dim in value.dims if len(dim) > 1]
        cut = {self._find_root(f) for dim in dims for f in dim if isinstance(f, OpenAxis)}
        free: list[list[int | None]] = [[None] * len(v.dims) for v in self._inputs]
        for number, (key, places) in enumerate(self._find_uncut_dimensions().items()):
            for index, d in places if key not in cut else ():
                free[index][d] = number
        return tuple(map(tuple, free))

    def refusal(self, node: fx.Node, reason: str) -> NonPointwiseError:
        return NonPointwiseError(
            f"{reason}. A kernel may cut tensors into up to {MAX_CELLS} pieces of one size, work on them element by "
            "element, and join them again.",
            called_op(node),
            location_of(node),
        )
