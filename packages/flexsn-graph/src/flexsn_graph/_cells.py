"""Functions that cut a dimension: halves, thirds, channels, pairs. Each piece is an argument of its own, a *cell*.

`x1, x2 = x.chunk(2, -1)` and `torch.cat((-x2, x1), -1)` read and write other elements of the same row. For a kernel
they are no such thing: it counts the elements of one half, and each half of `x` is an operand with strides. So a
dimension of `n` elements is a product of factors, outermost first: *axes*, which the kernel counts, and *cells*, which
are written out, one operand or value each. Halves are `(2 cells, axis of n/2)`; even and odd elements
`(axis of n/2, 2 cells)`; the channels of an image `(3 cells)`.

How a dimension is made of factors follows from what the function does with it. This is found by trying: each dimension
begins as one axis, and whatever cuts it raises `_Refined`, whereupon everything begins again. Two axes that an op
combines are one. No value may then have the same axis twice, or it would be an element and another one at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from flexsn_graph._location import called_op, location_of
from flexsn_graph._ops import ALIAS_OPS, EMPTY_OPS, FILL_OPS, SUM_OP, facts_of, is_pointwise, lacks_a_rule
from flexsn_graph._torch_private import FakeTensor
from flexsn_graph.errors import NonPointwiseError, UnsupportedCoreError

MAX_CELLS = 64
_MAX_ATTEMPTS = 256

_aten, _prims = torch.ops.aten, torch.ops.prims

# Cut or join, and are not decomposed.
CUTTING_OPS = frozenset(
    {
        _aten.bucketize.Tensor,
        _aten.cat.default,
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.searchsorted.Tensor,
        _aten.select_backward.default,
        _aten.slice_backward.default,
        _aten.slice_scatter.default,
        _aten.stack.default,
    }
)


@dataclass(frozen=True, slots=True)
class Axis:
    """A factor of a dimension that the kernel counts; in a finished graph, `number` is that among the step's axes."""

    number: int


@dataclass(frozen=True, slots=True)
class Cells:
    """A factor of a dimension that is written out; `chosen`: which one this is."""

    count: int
    chosen: int


Dimension: TypeAlias = tuple[Axis | Cells, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a kernel reads or writes of a tensor: for each of its dimensions the factors, outermost first."""

    tensor: int
    dimensions: tuple[Dimension, ...]

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements of `tensor`, at their places in a step of `shape`."""
        strides, offset = [0] * len(shape), tensor.storage_offset()
        for dimension, stride in zip(self.dimensions, tensor.stride(), strict=True):
            for factor in reversed(dimension):
                if isinstance(factor, Cells):
                    offset += factor.chosen * stride
                    stride *= factor.count
                else:
                    strides[factor.number] += stride
                    stride *= shape[factor.number]
        return tensor.as_strided(tuple(shape), strides, offset)


@dataclass(frozen=True, slots=True)
class CellResult:
    """A result of a function that cuts.

    Attributes:
        step: which step computes it; -1: none, it is a constant.
        dimensions: its shape, as factors.
        constant: the number that all of it is, if it is.
        summed: the axes of the step that it is summed over, after the kernel has written the terms.
    """

    step: int
    dimensions: tuple[Dimension, ...]
    constant: bool | int | float | None = None
    summed: tuple[int, ...] = ()

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Its shape in a step of `sizes`."""
        return tuple(
            math.prod(f.count if isinstance(f, Cells) else sizes[f.number] for f in dim) for dim in self.dimensions
        )


@dataclass(frozen=True, slots=True)
class CellModule:
    """A graph on elements of a step alone, `[*parts of the arguments] -> [*parts of some results]`.

    Attributes:
        module: of pointwise ops and constants.
        inputs: the part of an argument that each placeholder is.
        outputs: the part of a result that each entry of its output is.
        sizes: of the step's axes.
        where: of each axis of the step, `(argument, dimension)` that is it and nothing else; `None`: there is none, so
            that its size belongs to the graph.
    """

    module: fx.GraphModule
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    sizes: tuple[int, ...]
    where: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class CutModule:
    """A function that cuts: as many steps as its results have different elements, mostly one.

    Attributes:
        steps: what computes them.
        results: what becomes of the function's results.
        free: of each argument's dimensions, which size it has, counted over all of them, if it may have another one;
            `None`: it may not.
    """

    steps: tuple[CellModule, ...]
    results: tuple[CellResult, ...]
    free: tuple[tuple[int | None, ...], ...]


def in_cells(module: fx.GraphModule, *, sums_allowed: bool) -> CutModule:
    """Turns a lowered graph, views and cuts included, into those on elements of a step.

    Args:
        sums_allowed: over elements, which are taken after the kernel: the graph computes gradients.

    Raises:
        NonPointwiseError: it mixes elements otherwise than by cutting and joining.
    """
    refined: dict[_Key, tuple[_Spec, ...]] = {}
    blamed: dict[_Key, fx.Node] = {}
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _Pass(module, refined, blamed, sums_allowed).run()
        except _Refined as one:
            refined[one.key], blamed[one.key] = one.factors, one.node
    raise AssertionError("the factors of the dimensions are not found")


# Which axis: the number of the one that was made first, and of its factors.
_Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    key: _Key
    size: int


_Factor: TypeAlias = "_Axis | int"
# An axis or cells, of a size.
_Spec: TypeAlias = tuple[bool, int]
_Dim: TypeAlias = tuple[_Factor, ...]


class _Refined(Exception):
    """An axis is a product."""

    def __init__(self, node: fx.Node, axis: _Axis, *factors: _Spec) -> None:
        self.node = node
        self.key = axis.key
        self.factors = tuple(f for f in factors if f[1] > 1)


@dataclass(frozen=True, slots=True)
class _Value:
    """Attributes:
    dims: of each dimension, its factors without those of one element.
    cells: of the sizes of all cells, in order; which of `nodes` each is.
    nodes: of the new graph.
    summed: the axes that it is summed over, afterwards.
    zero: it is 0 whatever the arguments are.
    wide: of a sum that was converted, as it was before.
    """

    dims: tuple[_Dim, ...]
    cells: Tensor
    nodes: tuple[fx.Node, ...]
    summed: frozenset[_Axis] = frozenset()
    zero: bool = False
    wide: _Value | None = None

    @property
    def factors(self) -> list[_Factor]:
        return [f for dim in self.dims for f in dim]

    @property
    def axes(self) -> list[_Axis]:
        return [f for f in self.factors if isinstance(f, _Axis)]


def _size(dim: Sequence[_Factor]) -> int:
    return math.prod(f.size if isinstance(f, _Axis) else f for f in dim)


def _counts(dims: Sequence[_Dim]) -> list[int]:
    return [f for dim in dims for f in dim if not isinstance(f, _Axis)]


class _Pass:
    def __init__(
        self,
        module: fx.GraphModule,
        refined: Mapping[_Key, tuple[_Spec, ...]],
        blamed: Mapping[_Key, fx.Node],
        sums_allowed: bool,
    ) -> None:
        self._module = module
        self._refined = refined
        self._blamed = blamed
        self._sums_allowed = sums_allowed
        self._graph = fx.Graph()
        self._values: dict[fx.Node, _Value | tuple[_Value, ...]] = {}
        self._parents: dict[_Key, _Key] = {}
        self._made = 0
        self._inputs: list[_Value] = []
        # To be looked at when it is known which axes are one.
        self._distinct: list[tuple[fx.Node, list[_Axis]]] = []
        self._zeros: dict[torch.dtype, fx.Node] = {}

    def run(self) -> CutModule:
        nodes = list(self._module.graph.nodes)
        arguments: list[list[Any]] = []
        for node in nodes:
            if node.op == "placeholder":
                value, described = self._placeholder(node)
                self._values[node] = value
                self._inputs.append(value)
                arguments.append(described)
            elif node.op == "get_attr":
                self._values[node] = self._constant(node)
            elif node.op == "call_function":
                found = self._call(node)
                self._values[node] = found
                for one in found if isinstance(found, tuple) else (found,):
                    self._distinct.append((node, [*one.axes, *one.summed]))
        (output,) = (n for n in nodes if n.op == "output")
        self._check_distinct()
        return self._finish(output, arguments)

    # -- axes ----------------------------------------------------------------------------------------------

    def _new_dim(self, size: int) -> _Dim:
        self._made += 1
        return self._factors(_Axis((self._made,), size)) if size > 1 else ()

    def _factors(self, axis: _Axis) -> _Dim:
        known = self._refined.get(axis.key)
        if known is None:
            return (axis,)
        found: list[_Factor] = []
        for i, (is_axis, size) in enumerate(known):
            found += self._factors(_Axis((*axis.key, i), size)) if is_axis else (size,)
        return tuple(found)

    def _root(self, axis: _Axis) -> _Key:
        key = axis.key
        while key in self._parents:
            key = self._parents[key]
        return key

    def _unite(self, one: _Axis, other: _Axis) -> None:
        first, second = sorted((self._root(one), self._root(other)))
        if first != second:
            self._parents[second] = first

    def _check_distinct(self) -> None:
        for node, axes in self._distinct:
            roots = [self._root(a) for a in axes]
            if len(set(roots)) != len(roots):
                raise self._refusal(node, f"{called_op(node)} mixes elements of different places")

    # -- values --------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> tuple[_Value, list[Any]]:
        before = self._made + 1
        dims = tuple(self._new_dim(size) for size in node.meta["val"].shape)
        counts = _counts(dims)
        made_by = [key for key in self._blamed if key[0] in range(before, self._made + 1)]
        self._limit(self._blamed[made_by[-1]] if made_by else node, counts)
        index = len(self._inputs)
        made, described = [], []
        for flat in range(math.prod(counts)):
            new = self._graph.placeholder(f"input_{index}_{flat}")
            new.meta["val"] = node.meta["val"]
            made.append(new)
            described.append(_with_chosen(dims, flat, counts))
        return _Value(dims, torch.arange(math.prod(counts)).view(counts), tuple(made)), described

    def _constant(self, node: fx.Node) -> _Value:
        tensor = getattr(self._module, str(node.target))
        if isinstance(tensor, FakeTensor) or not isinstance(tensor, Tensor) or tensor.numel() > MAX_CELLS:
            raise self._refusal(node, "the function makes a constant that is no small tensor")
        dims: tuple[_Dim, ...] = tuple((size,) if size > 1 else () for size in tensor.shape)
        nodes = tuple(self._number(v, tensor) for v in tensor.flatten().tolist())
        return _Value(dims, torch.arange(len(nodes)).view(_counts(dims)), nodes)

    def _number(self, value: bool | int | float, like: Tensor) -> fx.Node:
        node = self._graph.call_function(_prims.scalar_tensor.default, (value,), {"dtype": like.dtype})
        node.meta["val"] = like
        return node

    def _zero(self, like: Tensor) -> fx.Node:
        if like.dtype not in self._zeros:
            self._zeros[like.dtype] = self._number(0, like)
        return self._zeros[like.dtype]

    def _value(self, node: fx.Node) -> _Value:
        value = self._values[node]
        assert isinstance(value, _Value), f"{node} has several results"
        return value

    def _limit(self, node: fx.Node, counts: Sequence[int]) -> None:
        if math.prod(counts) > MAX_CELLS:
            raise self._refusal(
                node, f"{called_op(node)} cuts a tensor into {math.prod(counts)} pieces, and {MAX_CELLS} are possible"
            )

    # -- ops -----------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> _Value | tuple[_Value, ...]:
        target: Any = node.target
        if target is operator.getitem:
            source = self._values[node.all_input_nodes[0]]
            assert isinstance(source, tuple)
            return source[node.args[1]]  # type: ignore[index]
        if target in FILL_OPS or target in EMPTY_OPS:
            return self._filled(node)
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, node, *node.args, **node.kwargs)  # type: ignore[no-any-return]
        if target in ALIAS_OPS:
            return self._regroup(node, self._value(node.all_input_nodes[0]), _shape(node))
        if is_pointwise(target):
            return self._pointwise(node)
        if lacks_a_rule(target):
            raise UnsupportedCoreError(
                f"{called_op(node)} has no rule. Write it in other ops, or add one with flexsn_codegen.register_op.",
                called_op(node),
                location_of(node),
            )
        raise self._refusal(node, f"{called_op(node)} does not work element by element")

    def _filled(self, node: fx.Node) -> _Value:
        target: Any = node.target
        dims = tuple(self._new_dim(size) for size in _shape(node))
        zero = False
        if target in EMPTY_OPS:
            new = self._graph.node_copy(node, lambda n: n)
        else:
            position = FILL_OPS[target]
            number: Any = 0 if position is None else node.args[position]
            if isinstance(number, fx.Node):
                return replace(self._value(number), dims=dims)
            new, zero = self._number(number, node.meta["val"]), number == 0
        counts = _counts(dims)
        self._limit(node, counts)
        return _Value(dims, torch.zeros(counts, dtype=torch.int64), (new,), zero=zero)

    def _pointwise(self, node: fx.Node) -> _Value | tuple[_Value, ...]:
        args = [self._value(a) if isinstance(a, fx.Node) else a for a in node.args]
        found = self._apply(node, node.target, args, node.meta["val"], node.kwargs)
        one = found[0] if isinstance(found, tuple) else found
        if tuple(_size(d) for d in one.dims) != _shape(node):
            raise self._refusal(node, f"{called_op(node)} mixes elements")
        return found

    def _apply(
        self, node: fx.Node, target: Any, args: Sequence[Any], like: Any, kwargs: Mapping[str, Any] | None = None
    ) -> _Value | tuple[_Value, ...]:
        """An op, element by element, on values and numbers; `like`: the fake result, whose dtype counts."""
        operands = {i: a for i, a in enumerate(args) if isinstance(a, _Value)}
        dims, aligned = self._aligned(node, list(operands.values()))
        counts = _counts(dims)
        self._limit(node, counts)
        summed = self._summed(node, target, args, like)
        expanded = [cells.expand(counts).flatten().tolist() for cells in aligned]
        # Of cells that are alike, one.
        known: dict[tuple[int, ...], int] = {}
        made: list[fx.Node] = []
        order = []
        for chosen in zip(*expanded, strict=True):
            if chosen not in known:
                known[chosen] = len(made)
                given = iter(o.nodes[c] for o, c in zip(operands.values(), chosen, strict=True))
                new = self._graph.call_function(
                    target, tuple(next(given) if isinstance(a, _Value) else a for a in args), dict(kwargs or {})
                )
                new.meta["val"], new.stack_trace = like, node.stack_trace
                made.append(new)
            order.append(known[chosen])
        cells = torch.tensor(order).view(counts)
        facts = facts_of(target)
        in_all = facts is not None and frozenset(operands) in facts.linear and len(operands) == _num_values(args)
        zero = in_all and all(o.zero for o in operands.values())
        if isinstance(like, Tensor):
            wide = None
            if summed and target is _prims.convert_element_type.default:
                wide = operands[0].wide or operands[0]
            return _Value(dims, cells, tuple(made), summed, zero, wide)
        parts = []
        for i, one in enumerate(like):
            picked = []
            for source_node in made:
                new = self._graph.call_function(operator.getitem, (source_node, i))
                new.meta["val"], new.stack_trace = one, node.stack_trace
                picked.append(new)
            parts.append(_Value(dims, cells, tuple(picked), summed))
        return tuple(parts)

    def one(self, node: fx.Node, op: str, *args: Any, dtype: torch.dtype) -> _Value:
        """A prim with one result of `dtype`."""
        like = torch.empty((), dtype=dtype, device="meta")
        if op == "convert_element_type":
            args = (*args, dtype)
        found = self._apply(node, getattr(_prims, op).default, args, like)
        assert isinstance(found, _Value)
        return found

    def _summed(self, node: fx.Node, target: Any, args: Sequence[Any], like: Any) -> frozenset[_Axis]:
        """The axes that the result is summed over; refuses what is not linear in a sum. As in `_positions`."""
        operands = {i: a for i, a in enumerate(args) if isinstance(a, _Value)}
        sums = {i: o.summed for i, o in operands.items() if o.summed}
        if not sums:
            return frozenset()
        facts = facts_of(target)
        first = next(iter(sums.values()))
        same = all({self._root(a) for a in s} == {self._root(a) for a in first} for s in sums.values())
        linear = facts is not None and any(
            set(sums) <= together
            and all(
                operands[i].zero if i in operands else i < len(args) and args[i] == 0 for i in together - set(sums)
            )
            for together in facts.linear
        )
        if not same or not linear or not like.is_floating_point():
            raise self._refusal(node, f"{called_op(node)} uses a sum over elements")
        for operand in operands.values():
            self._distinct.append((node, [*operand.axes, *first]))
        return first

    # -- dimensions ----------------------------------------------------------------------------------------

    def _aligned(self, node: fx.Node, values: Sequence[_Value]) -> tuple[tuple[_Dim, ...], list[Tensor]]:
        """The dimensions that values broadcast to, and the cells of each, with a 1 where it has none of them."""
        rank = max((len(v.dims) for v in values), default=0)
        padded = [((),) * (rank - len(v.dims)) + v.dims for v in values]
        dims = []
        for column in zip(*padded, strict=True):
            there = [d for d in column if d]
            one: _Dim = there[0] if there else ()
            for other in there[1:]:
                one = self._common(node, one, other)
            dims.append(one)
        cells = []
        for value, own in zip(values, padded, strict=True):
            sizes: list[int] = []
            for mine, common in zip(own, dims, strict=True):
                sizes += _counts([common]) if mine else [1] * len(_counts([common]))
            cells.append(value.cells.reshape(sizes))
        return tuple(dims), cells

    def _common(self, node: fx.Node, one: _Dim, other: _Dim) -> _Dim:
        """What two ways to factor a dimension have in common; refines axes, and unites them."""
        left, right, found = list(one), list(other), []
        while left and right:
            a, b = left[0], right[0]
            size, wanted = (f.size if isinstance(f, _Axis) else f for f in (a, b))
            if size == wanted:
                if isinstance(a, _Axis) and isinstance(b, _Axis):
                    self._unite(a, b)
                elif isinstance(a, _Axis):
                    raise _Refined(node, a, (False, size))
                elif isinstance(b, _Axis):
                    raise _Refined(node, b, (False, size))
                found.append(a)
                del left[0], right[0]
                continue
            larger, small, sequence = (a, wanted, left) if size > wanted else (b, size, right)
            large = max(size, wanted)
            if large % small:
                raise self._refusal(node, f"{called_op(node)} combines pieces of different sizes")
            if isinstance(larger, _Axis):
                raise _Refined(node, larger, (True, small), (True, large // small))
            sequence[:1] = [small, large // small]
        return tuple(found)

    def _regroup(self, node: fx.Node, value: _Value, shape: Sequence[int]) -> _Value:
        """`view`: the factors in order, in other dimensions."""
        if math.prod(shape) != math.prod(_size(d) for d in value.dims):
            raise self._refusal(node, f"{called_op(node)} picks some of the elements")
        factors = list(value.factors)
        dims: list[_Dim] = []
        for size in shape:
            dim: list[_Factor] = []
            while _size(dim) < size:
                missing = size // _size(dim)
                factor = factors.pop(0)
                here = factor.size if isinstance(factor, _Axis) else factor
                if here > missing:
                    if size % _size(dim) or here % missing:
                        raise self._refusal(node, f"{called_op(node)} moves elements")
                    if isinstance(factor, _Axis):
                        raise _Refined(node, factor, (True, missing), (True, here // missing))
                    factor, rest = missing, here // missing
                    factors.insert(0, rest)
                elif missing % here or size % _size(dim):
                    raise self._refusal(node, f"{called_op(node)} moves elements")
                dim.append(factor)
            dims.append(tuple(dim))
        return replace(value, dims=tuple(dims), cells=value.cells.reshape(_counts(dims)), wide=None)

    def _permute(self, node: fx.Node, value: _Value, order: Sequence[int]) -> _Value:
        dims = tuple(value.dims[d] for d in order)
        places, at = [], 0
        for dim in value.dims:
            count = len(_counts([dim]))
            places.append(list(range(at, at + count)))
            at += count
        return replace(value, dims=dims, cells=value.cells.permute([p for d in order for p in places[d]]), wide=None)

    def _expand(self, node: fx.Node, value: _Value) -> _Value:
        shape = _shape(node)
        own = ((),) * (len(shape) - len(value.dims)) + value.dims
        dims = tuple(d or self._new_dim(size) for d, size in zip(own, shape, strict=True))
        sizes: list[int] = []
        for mine, new in zip(own, dims, strict=True):
            sizes += _counts([new]) if mine else [1] * len(_counts([new]))
        self._limit(node, _counts(dims))
        return replace(value, dims=dims, cells=value.cells.reshape(sizes).expand(_counts(dims)), wide=None)

    def _leading(self, node: fx.Node, dim: _Dim, unit: int) -> tuple[int, _Dim]:
        """A dimension as `(cells, the rest)`, the rest of so many elements."""
        count, rest = 1, list(dim)
        while _size(rest) > unit:
            factor = rest[0]
            if isinstance(factor, _Axis):
                inside = _size(rest[1:])
                # Of the axis, what lies inside of one piece.
                kept = unit // inside if unit % inside == 0 else 1
                kept = kept if factor.size % kept == 0 else 1
                raise _Refined(node, factor, (False, factor.size // kept), (True, kept))
            within = _size(rest) // factor
            if within >= unit:
                count *= factor
                del rest[0]
            else:
                if unit % within or factor % (unit // within):
                    raise self._refusal(node, f"{called_op(node)} cuts pieces of different sizes")
                count *= factor // (unit // within)
                rest[0] = unit // within
        if _size(rest) != unit:
            raise self._refusal(node, f"{called_op(node)} cuts pieces of different sizes")
        return count, tuple(rest)

    def _trailing(self, node: fx.Node, dim: _Dim, step: int) -> tuple[_Dim, int]:
        """A dimension as `(the rest, so many cells)`."""
        found, rest = 1, list(dim)
        while found < step:
            factor = rest[-1]
            missing = step // found
            size = factor.size if isinstance(factor, _Axis) else factor
            if step % found or (size % missing and missing % size):
                raise self._refusal(node, f"{called_op(node)} takes each {step}th element of {_size(dim)}")
            taken = min(size, missing)
            if isinstance(factor, _Axis):
                raise _Refined(node, factor, (True, size // taken), (False, taken))
            rest[-1:] = [size // taken] if size > taken else []
            found *= taken
        return tuple(rest), step

    def _with_dim(self, value: _Value, dim: int, factors: _Dim) -> _Value:
        """The same, with one dimension's cells grouped otherwise."""
        dims = (*value.dims[:dim], factors, *value.dims[dim + 1 :])
        return replace(value, dims=dims, cells=value.cells.reshape(_counts(dims)), wide=None)

    def _cell_axis(self, value: _Value, dim: int) -> int:
        """Where the cells of a dimension begin."""
        return len(_counts(value.dims[:dim]))

    def _slice(self, node: fx.Node, value: _Value, dim: int, start: int, end: int, step: int = 1) -> _Value:
        dim %= len(value.dims)
        size = _size(value.dims[dim])
        start, end = (max(0, min(size, p + size if p < 0 else p)) for p in (start, end))
        count = max(0, -(-(end - start) // step))
        if count == size:
            return value
        if count == 0:
            raise self._refusal(node, f"{called_op(node)} leaves nothing")
        if step > 1 and count * step == size and start < step:
            rest, cells = self._trailing(node, value.dims[dim], step)
            value = self._with_dim(value, dim, (*rest, cells))
            at = self._cell_axis(value, dim) + len(_counts([rest]))
            return replace(
                value, dims=(*value.dims[:dim], rest, *value.dims[dim + 1 :]), cells=value.cells.select(at, start)
            )
        unit = math.gcd(size, start, end) if step == 1 else 1
        number, rest = self._leading(node, value.dims[dim], unit)
        value = self._with_dim(value, dim, (number, *rest))
        at = self._cell_axis(value, dim)
        cells_left = value.cells[(slice(None),) * at + (slice(start // unit, end // unit, step),)]
        kept = cells_left.shape[at]
        lead: _Dim = (kept,) if kept > 1 else ()
        dims = (*value.dims[:dim], (*lead, *rest), *value.dims[dim + 1 :])
        return replace(value, dims=dims, cells=cells_left.reshape(_counts(dims)))

    def _cat(self, node: fx.Node, values: Sequence[_Value], dim: int) -> _Value:
        dim %= len(values[0].dims)
        sums = {frozenset(self._root(a) for a in v.summed) for v in values if not v.zero}
        if len(sums) > 1:
            raise self._refusal(node, f"{called_op(node)} joins sums with what is none")
        unit = math.gcd(*(_size(v.dims[dim]) for v in values))
        split = [self._leading(node, v.dims[dim], unit) for v in values]
        alike = [self._with_dim(v, dim, (n, *rest)) for v, (n, rest) in zip(values, split, strict=True)]
        # All but the cells in front are the same.
        without = [replace(v, dims=(*v.dims[:dim], v.dims[dim][1:], *v.dims[dim + 1 :])) for v in alike]
        dims = without[0].dims
        for other in without[1:]:
            dims = tuple(self._common(node, a, b) if a and b else a or b for a, b in zip(dims, other.dims, strict=True))
        if any(tuple(map(_size, v.dims)) != tuple(map(_size, dims)) for v in without):
            raise self._refusal(node, f"{called_op(node)} joins tensors of different shapes")
        nodes: list[fx.Node] = []
        tables = []
        for value, (number, _) in zip(alike, split, strict=True):
            counts = [*_counts(dims[:dim]), number, *_counts(dims[dim:])]
            tables.append(value.cells.reshape(counts) + len(nodes))
            nodes += value.nodes
        cells = torch.cat(tables, len(_counts(dims[:dim])))
        total = sum(number for number, _ in split)
        joined = (*dims[:dim], (*((total,) if total > 1 else ()), *dims[dim]), *dims[dim + 1 :])
        self._limit(node, _counts(joined))
        first = next((v for v in values if not v.zero), values[0])
        zero = all(v.zero for v in values)
        return _Value(joined, cells.reshape(_counts(joined)), tuple(nodes), first.summed, zero)

    def _zeros_like(self, value: _Value, dim: int, size: int, like: Tensor) -> _Value:
        """Zeros of the same shape, but for one dimension of `size`, which is to be joined."""
        dims = (*value.dims[:dim], self._new_dim(size), *value.dims[dim + 1 :])
        counts = _counts(dims)
        return _Value(dims, torch.zeros(counts, dtype=torch.int64), (self._zero(like),), value.summed, zero=True)

    def _put(self, node: fx.Node, value: _Value, dim: int, start: int, end: int, step: int, size: int) -> _Value:
        """`slice_backward`: the value at some places of a dimension of `size`, zeros at the others."""
        like = node.meta["val"]
        dim %= len(value.dims)
        start, end = (max(0, min(size, p + size if p < 0 else p)) for p in (start, end))
        count = _size(value.dims[dim])
        if step > 1:
            if count * step != size:
                raise self._refusal(node, f"{called_op(node)} takes each {step}th element of {size}")
            after = self._unsqueeze(value, dim + 1)
            pieces = [self._zeros_like(after, dim + 1, 1, like)] * step
            pieces[start] = after
            joined = self._cat(node, pieces, dim + 1)
            return self._regroup(node, joined, _shape(node))
        parts = [value]
        if start:
            parts.insert(0, self._zeros_like(value, dim, start, like))
        if start + count < size:
            parts.append(self._zeros_like(value, dim, size - start - count, like))
        return self._cat(node, parts, dim) if len(parts) > 1 else value

    def _unsqueeze(self, value: _Value, dim: int) -> _Value:
        return replace(value, dims=(*value.dims[:dim], (), *value.dims[dim:]))

    def _sum(self, node: fx.Node, value: _Value, dims: Sequence[int]) -> _Value:
        """Cells are added up here; what is summed over axes is summed after the kernel."""
        cells, left, gone = value.cells, [], set(value.summed)
        at = 0
        tables: list[int] = []
        for number, dim in enumerate(value.dims):
            count = len(_counts([dim]))
            if number in {d % len(value.dims) for d in dims}:
                gone.update(f for f in dim if isinstance(f, _Axis))
                tables += range(at, at + count)
            else:
                left.append(dim)
            at += count
        others = [i for i in range(cells.dim()) if i not in tables]
        grouped = cells.permute([*others, *tables]).reshape([*(cells.shape[i] for i in others), -1])
        rows = grouped.reshape(-1, grouped.shape[-1]).tolist()
        made = []
        for row in rows:
            total = value.nodes[row[0]]
            for one in row[1:]:
                new = self._graph.call_function(_prims.add.default, (total, value.nodes[one]))
                new.meta["val"], new.stack_trace = node.meta["val"], node.stack_trace
                total = new
            made.append(total)
        new_cells = torch.arange(len(made)).view(grouped.shape[:-1])
        if value.zero:
            gone = set()
        if gone and not self._sums_allowed:
            raise self._refusal(node, f"{called_op(node)} sums over elements")
        return _Value(tuple(left), new_cells, tuple(made), frozenset(gone), value.zero)

    # -- results -------------------------------------------------------------------------------------------

    def _finish(self, output: fx.Node, arguments: Sequence[Sequence[Any]]) -> CutModule:
        entries: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        values = [self._value(entry) for entry in entries]
        groups: dict[frozenset[_Key], list[int]] = {}
        results: dict[int, CellResult] = {}
        for i, value in enumerate(values):
            constant = _number_of(value)
            if constant is not None:
                results[i] = CellResult(-1, self._fixed(value, {}), constant)
            else:
                groups.setdefault(frozenset(self._root(a) for a in (*value.axes, *value.summed)), []).append(i)
        parts = [Part(i, p) for i, described in enumerate(arguments) for p in described]
        steps = tuple(self._step(n, group, values, parts, results) for n, group in enumerate(groups.values()))
        return CutModule(steps, tuple(results[i] for i in range(len(values))), self._free())

    def _step(
        self,
        number: int,
        group: Sequence[int],
        values: Sequence[_Value],
        parts: Sequence[Part],
        results: dict[int, CellResult],
    ) -> CellModule:
        """What computes the results in `group`, which have the same axes."""
        # In the order of one that is not summed, if there is one.
        first = min((values[i] for i in group), key=lambda v: len(v.summed))
        axes = [*sorted(first.summed, key=self._root), *first.axes]
        numbers = {self._root(a): i for i, a in enumerate(axes)}
        nodes, outputs = [], []
        for i in group:
            value = values[i]
            written = value.wide if value.summed and value.wide is not None else value
            for flat, node in enumerate(written.cells.reshape(-1).tolist()):
                described = _with_chosen(value.dims, flat, _counts(value.dims))
                outputs.append(Part(i, self._resolved(described, numbers)))
                nodes.append(written.nodes[node])
            summed = tuple(sorted(numbers[self._root(a)] for a in value.summed))
            results[i] = CellResult(number, self._fixed(value, numbers), None, summed)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[n] for n in nodes))
        inputs = tuple(Part(p.tensor, self._resolved(p.dimensions, numbers)) for p in parts)
        where: list[tuple[int, int] | None] = [None] * len(axes)
        for key, places in self._whole().items():
            if key in numbers:
                where[numbers[key]] = places[0]
        return CellModule(fx.GraphModule({}, graph), inputs, tuple(outputs), tuple(a.size for a in axes), tuple(where))

    def _fixed(self, value: _Value, numbers: Mapping[_Key, int]) -> tuple[Dimension, ...]:
        """The dimensions of a result; those of a constant are cells of any number."""
        return tuple(
            tuple(
                Axis(numbers[self._root(f)])
                if isinstance(f, _Axis) and self._root(f) in numbers
                else Cells(f.size if isinstance(f, _Axis) else f, 0)
                for f in dim
            )
            for dim in value.dims
        )

    def _resolved(self, described: Any, numbers: Mapping[_Key, int]) -> tuple[Dimension, ...]:
        found = []
        for dim in described:
            factors: list[Axis | Cells] = []
            for factor in dim:
                if isinstance(factor, _Axis):
                    number = numbers.get(self._root(factor))
                    # An axis that no result has: what reads it is not used.
                    factors.append(Cells(factor.size, 0) if number is None else Axis(number))
                else:
                    factors.append(Cells(*factor))
            found.append(tuple(factors))
        return tuple(found)

    def _whole(self) -> dict[_Key, list[tuple[int, int]]]:
        """By axis, the arguments' dimensions that are it alone."""
        found: dict[_Key, list[tuple[int, int]]] = {}
        for index, value in enumerate(self._inputs):
            for d, dim in enumerate(value.dims):
                if len(dim) == 1 and isinstance(dim[0], _Axis):
                    found.setdefault(self._root(dim[0]), []).append((index, d))
        return found

    def _free(self) -> tuple[tuple[int | None, ...], ...]:
        """The dimensions that are whole axes, and no part of a dimension that is cut."""
        dims = [dim for value in self._inputs for dim in value.dims if len(dim) > 1]
        cut = {self._root(f) for dim in dims for f in dim if isinstance(f, _Axis)}
        free: list[list[int | None]] = [[None] * len(v.dims) for v in self._inputs]
        for number, (key, places) in enumerate(self._whole().items()):
            for index, d in places if key not in cut else ():
                free[index][d] = number
        return tuple(map(tuple, free))

    def _refusal(self, node: fx.Node, what: str) -> NonPointwiseError:
        return NonPointwiseError(
            f"{what}. A kernel may cut tensors into up to {MAX_CELLS} pieces of one size, work on these element by "
            "element, and join them again.",
            called_op(node),
            location_of(node),
        )


def _num_values(args: Sequence[Any]) -> int:
    return sum(isinstance(a, _Value | bool | int | float) for a in args)


def _number_of(value: _Value) -> bool | int | float | None:
    """The number that all of a value is; `None`: it is none."""
    (node, *others) = {value.nodes[i] for i in value.cells.flatten().tolist()}
    if others or node.op != "call_function" or node.target is not _prims.scalar_tensor.default:
        return None
    number: Any = node.args[0]
    return number  # type: ignore[no-any-return]


def _with_chosen(dims: Sequence[_Dim], flat: int, counts: Sequence[int]) -> Any:
    """The dimensions, with `(count, which one)` for cells."""
    chosen = []
    for count in reversed(counts):
        chosen.append(flat % count)
        flat //= count
    given = iter(reversed(chosen))
    return tuple(tuple(f if isinstance(f, _Axis) else (f, next(given)) for f in dim) for dim in dims)


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()


# -- what the ops do to dimensions -------------------------------------------------------------------------------

_Rule: TypeAlias = Callable[..., Any]
_RULES: dict[Any, _Rule] = {}
_END = 2**63 - 1


def _rule(*ops: Any) -> Callable[[_Rule], _Rule]:
    def decorate(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return decorate


@_rule(_aten.slice.Tensor)
def _slice(
    self: _Pass, node: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> _Value:
    return self._slice(node, self._value(x), dim, start or 0, _END if end is None else end, step)


@_rule(_aten.select.int)
def _select(self: _Pass, node: fx.Node, x: fx.Node, dim: int, index: int) -> _Value:
    value = self._value(x)
    dim %= len(value.dims)
    index %= max(1, _size(value.dims[dim]))
    found = self._slice(node, value, dim, index, index + 1)
    return replace(found, dims=(*found.dims[:dim], *found.dims[dim + 1 :]))


@_rule(_aten.unbind.int)
def _unbind(self: _Pass, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[_Value, ...]:
    value = self._value(x)
    return tuple(_select(self, node, x, dim, i) for i in range(_size(value.dims[dim % len(value.dims)])))


@_rule(_aten.split.Tensor)
def _split(self: _Pass, node: fx.Node, x: fx.Node, size: int, dim: int = 0) -> tuple[_Value, ...]:
    value = self._value(x)
    total = _size(value.dims[dim % len(value.dims)])
    return tuple(self._slice(node, value, dim, at, min(total, at + size)) for at in range(0, total, size))


@_rule(_aten.split_with_sizes.default)
def _split_with_sizes(self: _Pass, node: fx.Node, x: fx.Node, sizes: Sequence[int], dim: int = 0) -> Any:
    value, at, found = self._value(x), 0, []
    for size in sizes:
        found.append(self._slice(node, value, dim, at, at + size))
        at += size
    return tuple(found)


@_rule(_aten.cat.default)
def _cat(self: _Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> _Value:
    return self._cat(node, [self._value(t) for t in tensors], dim)


@_rule(_aten.stack.default)
def _stack(self: _Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> _Value:
    dim %= len(_shape(node))
    return self._cat(node, [self._unsqueeze(self._value(t), dim) for t in tensors], dim)


@_rule(_aten.slice_backward.default)
def _slice_backward(
    self: _Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> _Value:
    return self._put(node, self._value(grad), dim % len(sizes), start, end, step, sizes[dim])


@_rule(_aten.select_backward.default)
def _select_backward(
    self: _Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, index: int
) -> _Value:
    dim %= len(sizes)
    index %= sizes[dim]
    return self._put(node, self._unsqueeze(self._value(grad), dim), dim, index, index + 1, 1, sizes[dim])


@_rule(_aten.slice_scatter.default)
def _slice_scatter(
    self: _Pass,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> _Value:
    value, dim = self._value(x), dim % len(_shape(node))
    size = _shape(node)[dim]
    first = start or 0
    last = min(size, _END if end is None else end)
    if step != 1:
        raise self._refusal(node, f"{called_op(node)} writes to each {step}th element")
    parts = [self._value(source)]
    if first:
        parts.insert(0, self._slice(node, value, dim, 0, first))
    if last < size:
        parts.append(self._slice(node, value, dim, last, size))
    return self._cat(node, parts, dim)


@_rule(SUM_OP)
def _sum(self: _Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> _Value:
    value = self._value(x)
    return self._sum(node, value, range(len(value.dims)) if dims is None else dims)


@_rule(_aten.expand.default)
def _expand(self: _Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> _Value:
    return self._expand(node, self._value(x))


@_rule(_prims.broadcast_in_dim.default)
def _broadcast_in_dim(self: _Pass, node: fx.Node, x: fx.Node, shape: Sequence[int], places: Sequence[int]) -> _Value:
    value = self._value(x)
    dims: list[_Dim] = [()] * len(shape)
    for place, dim in zip(places, value.dims, strict=True):
        dims[place] = dim
    return self._expand(node, replace(value, dims=tuple(dims)))


@_rule(_aten.permute.default, _prims.transpose.default)
def _permute(self: _Pass, node: fx.Node, x: fx.Node, order: Sequence[int]) -> _Value:
    value = self._value(x)
    return self._permute(node, value, [d % len(value.dims) for d in order])


@_rule(_aten.transpose.int)
def _transpose(self: _Pass, node: fx.Node, x: fx.Node, one: int, other: int) -> _Value:
    value = self._value(x)
    order = list(range(len(value.dims)))
    order[one], order[other] = order[other], order[one]
    return self._permute(node, value, order)


@_rule(_aten.t.default)
def _t(self: _Pass, node: fx.Node, x: fx.Node) -> _Value:
    value = self._value(x)
    return self._permute(node, value, list(reversed(range(len(value.dims)))))


@_rule(_aten.lift_fresh_copy.default, _aten.alias.default, _aten.detach.default, _prims.view_of.default)
@_rule(_prims.clone.default, _prims.device_put.default)
def _same(self: _Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> _Value:
    return self._value(x)


# -- small tables ------------------------------------------------------------------------------------------------


def _looked_up_at(
    self: _Pass, node: fx.Node, rank: int, indices: Sequence[fx.Node | None]
) -> tuple[int, _Value]:
    """The dimension that is indexed, and by what."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype not in (torch.int64, torch.int32):
        raise self._refusal(node, f"{called_op(node)} picks elements otherwise than by numbers, along one dimension")
    dim, index = given[0]
    value = self._value(index)
    if not value.dims:
        return dim, value
    before, after = ((),) * dim, ((),) * (rank - dim - 1)
    return dim, replace(value, dims=(*before, *value.dims, *after))


def _places(self: _Pass, node: fx.Node, index: _Value, count: int) -> _Value:
    """Indices from the end, counted from the beginning."""
    like = index.nodes[0].meta["val"].dtype
    negative = self.one(node, "lt", index, 0, dtype=torch.bool)
    return self.one(node, "where", negative, self.one(node, "add", index, count, dtype=like), index, dtype=like)


@_rule(_aten.index.Tensor)
def _index(self: _Pass, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> _Value:
    """`table[index]`: each of the table's entries is an operand, and one after the other is chosen."""
    table = self._value(x)
    dim, index = _looked_up_at(self, node, len(table.dims), indices)
    count = _size(table.dims[dim])
    index = _places(self, node, index, count)
    new = len(index.dims) - len(table.dims) + 1
    dtype = node.meta["val"].dtype
    found: Any = math.nan if dtype.is_floating_point else 0  # eager mode refuses an index that is out of range
    for i in range(count):
        entry = self._slice(node, table, dim, i, i + 1)
        entry = replace(entry, dims=(*entry.dims[:dim], *((),) * new, *entry.dims[dim + 1 :]))
        here = self.one(node, "eq", index, i, dtype=torch.bool)
        found = self.one(node, "where", here, entry, found, dtype=dtype)
    return found  # type: ignore[no-any-return]


@_rule(_aten.index_put.default)
def _index_put(
    self: _Pass,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> _Value:
    """The gradient of `table[index]`: to each entry, the sum of what was given to it."""
    table, given = self._value(x), self._value(values)
    dim, index = _looked_up_at(self, node, len(table.dims), indices)
    if not accumulate or not table.zero:
        raise self._refusal(node, f"{called_op(node)} writes to elements that are picked by numbers")
    count = _size(table.dims[dim])
    index = _places(self, node, index, count)
    new = len(index.dims) - len(table.dims) + 1
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if wide != dtype:
        given = self.one(node, "convert_element_type", given, dtype=wide)
    entries = []
    for i in range(count):
        here = self.one(node, "eq", index, i, dtype=torch.bool)
        one = self.one(node, "where", here, given, 0.0, dtype=wide)
        total = self._sum(node, one, range(dim, dim + new))
        entries.append(self._unsqueeze(total, dim))
    joined = self._cat(node, entries, dim)
    return self.one(node, "convert_element_type", joined, dtype=dtype) if wide != dtype else joined


def _counted(self: _Pass, node: fx.Node, sequence: _Value, x: _Value, right: bool) -> _Value:
    """How many numbers of a sorted sequence are less than `x`, or not more if `right`; NaN is behind all."""
    dtype, total = node.meta["val"].dtype, None
    for i in range(_size(sequence.dims[0])):
        entry = replace(self._slice(node, sequence, 0, i, i + 1), dims=())
        beyond = self.one(node, "gt" if right else "ge", entry, x, dtype=torch.bool)
        before = self.one(node, "bitwise_not", beyond, dtype=torch.bool)
        number = self.one(node, "convert_element_type", before, dtype=dtype)
        total = number if total is None else self.one(node, "add", total, number, dtype=dtype)
    assert total is not None
    return total


@_rule(_aten.bucketize.Tensor)
def _bucketize(
    self: _Pass, node: fx.Node, x: fx.Node, boundaries: fx.Node, *, out_int32: bool = False, right: bool = False
) -> _Value:
    return _counted(self, node, self._value(boundaries), self._value(x), right)


@_rule(_aten.searchsorted.Tensor)
def _searchsorted(
    self: _Pass,
    node: fx.Node,
    sequence: fx.Node,
    x: fx.Node,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: fx.Node | None = None,
) -> _Value:
    values = self._value(sequence)
    if len(values.dims) != 1 or sorter is not None:
        raise self._refusal(node, f"{called_op(node)} searches in more than one sequence")
    return _counted(self, node, values, self._value(x), right or side == "right")
