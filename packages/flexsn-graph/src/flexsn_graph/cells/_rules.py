"""Rules for ops that cut, join, move and sum dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from flexsn_graph._location import called_op
from flexsn_graph.cells._registry import rule
from flexsn_graph.cells._values import Dim, Value, shape_of, size_of
from flexsn_graph.ir._ops import SUM_OP

if TYPE_CHECKING:
    from flexsn_graph.cells._pass import Pass

_aten, _prims = torch.ops.aten, torch.ops.prims
_END = 2**63 - 1


@rule(_aten.slice.Tensor)
def _slice(
    cell_pass: Pass, node: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    return cell_pass.slice(node, cell_pass.value(x), dim, start or 0, _END if end is None else end, step)


@rule(_aten.select.int)
def _select(cell_pass: Pass, node: fx.Node, x: fx.Node, dim: int, index: int) -> Value:
    value = cell_pass.value(x)
    dim %= len(value.dims)
    index %= max(1, size_of(value.dims[dim]))
    result = cell_pass.slice(node, value, dim, index, index + 1)
    return replace(result, dims=(*result.dims[:dim], *result.dims[dim + 1 :]))


@rule(_aten.unbind.int)
def _unbind(cell_pass: Pass, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[Value, ...]:
    value = cell_pass.value(x)
    return tuple(_select(cell_pass, node, x, dim, i) for i in range(size_of(value.dims[dim % len(value.dims)])))


@rule(_aten.split.Tensor)
def _split(cell_pass: Pass, node: fx.Node, x: fx.Node, size: int, dim: int = 0) -> tuple[Value, ...]:
    value = cell_pass.value(x)
    total = size_of(value.dims[dim % len(value.dims)])
    return tuple(cell_pass.slice(node, value, dim, at, min(total, at + size)) for at in range(0, total, size))


@rule(_aten.split_with_sizes.default)
def _split_with_sizes(cell_pass: Pass, node: fx.Node, x: fx.Node, sizes: Sequence[int], dim: int = 0) -> Any:
    value, at, result = cell_pass.value(x), 0, []
    for size in sizes:
        result.append(cell_pass.slice(node, value, dim, at, at + size))
        at += size
    return tuple(result)


@rule(_aten.cat.default)
def _cat(cell_pass: Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    return cell_pass.cat(node, [cell_pass.value(t) for t in tensors], dim)


@rule(_aten.stack.default)
def _stack(cell_pass: Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    dim %= len(shape_of(node))
    return cell_pass.cat(node, [cell_pass.unsqueeze(cell_pass.value(t), dim) for t in tensors], dim)


@rule(_aten.slice_backward.default)
def _slice_backward(
    cell_pass: Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    return cell_pass.put(node, cell_pass.value(grad), dim % len(sizes), start, end, step, sizes[dim])


@rule(_aten.select_backward.default)
def _select_backward(
    cell_pass: Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, index: int
) -> Value:
    dim %= len(sizes)
    index %= sizes[dim]
    return cell_pass.put(node, cell_pass.unsqueeze(cell_pass.value(grad), dim), dim, index, index + 1, 1, sizes[dim])


@rule(_aten.slice_scatter.default)
def _slice_scatter(
    cell_pass: Pass,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    value, dim = cell_pass.value(x), dim % len(shape_of(node))
    size = shape_of(node)[dim]
    first = start or 0
    last = min(size, _END if end is None else end)
    if step != 1:
        raise cell_pass.refusal(node, f"{called_op(node)} writes to one of every {step} elements")
    parts = [cell_pass.value(source)]
    if first:
        parts.insert(0, cell_pass.slice(node, value, dim, 0, first))
    if last < size:
        parts.append(cell_pass.slice(node, value, dim, last, size))
    return cell_pass.cat(node, parts, dim)


@rule(SUM_OP)
def _sum(cell_pass: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = cell_pass.value(x)
    return cell_pass.sum(node, value, _normalize_dims(value, dims))


def _normalize_dims(value: Value, dims: Sequence[int] | None) -> list[int]:
    rank = len(value.dims)
    return list(range(rank)) if dims is None else [d % rank for d in dims]


@rule(_prims.amax.default)
def _amax(cell_pass: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = cell_pass.value(x)
    return cell_pass.extreme(node, value, _normalize_dims(value, dims), largest=True)


@rule(_prims.amin.default)
def _amin(cell_pass: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = cell_pass.value(x)
    return cell_pass.extreme(node, value, _normalize_dims(value, dims), largest=False)


@rule(_prims.var.default)
def _var(
    cell_pass: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, correction: float = 1.0, **_: Any
) -> Value:
    """The variance: the mean of the squared distances from the mean."""
    value, dtype = cell_pass.value(x), node.meta["val"].dtype
    reduced = _normalize_dims(value, dims)
    count = math.prod(size_of(value.dims[d]) for d in reduced)
    mean = cell_pass.apply_prim(node, "div", cell_pass.sum(node, value, reduced), float(count), dtype=dtype)
    for d in sorted(reduced):
        mean = cell_pass.unsqueeze(mean, d)
    distance = cell_pass.apply_prim(node, "sub", value, mean, dtype=dtype)
    squares = cell_pass.sum(node, cell_pass.apply_prim(node, "mul", distance, distance, dtype=dtype), reduced)
    divisor = max(0.0, count - float(correction))
    return cell_pass.apply_prim(node, "div", squares, divisor, dtype=dtype)


@rule(_aten.expand.default)
def _expand(cell_pass: Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Value:
    return cell_pass.expand(node, cell_pass.value(x))


@rule(_prims.broadcast_in_dim.default)
def _broadcast_in_dim(
    cell_pass: Pass, node: fx.Node, x: fx.Node, shape: Sequence[int], positions: Sequence[int]
) -> Value:
    value = cell_pass.value(x)
    dims: list[Dim] = [()] * len(shape)
    for position, dim in zip(positions, value.dims, strict=True):
        dims[position] = dim
    return cell_pass.expand(node, replace(value, dims=tuple(dims)))


@rule(_aten.permute.default, _prims.transpose.default)
def _permute(cell_pass: Pass, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Value:
    value = cell_pass.value(x)
    return cell_pass.permute(node, value, [d % len(value.dims) for d in order])


@rule(_aten.transpose.int)
def _transpose(cell_pass: Pass, node: fx.Node, x: fx.Node, dim: int, other_dim: int) -> Value:
    value = cell_pass.value(x)
    order = list(range(len(value.dims)))
    order[dim], order[other_dim] = order[other_dim], order[dim]
    return cell_pass.permute(node, value, order)


@rule(_aten.t.default)
def _t(cell_pass: Pass, node: fx.Node, x: fx.Node) -> Value:
    value = cell_pass.value(x)
    return cell_pass.permute(node, value, list(reversed(range(len(value.dims)))))


@rule(_aten.lift_fresh_copy.default, _aten.alias.default, _aten.detach.default, _prims.view_of.default)
@rule(_prims.clone.default, _prims.device_put.default)
def _same(cell_pass: Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Value:
    return cell_pass.value(x)
