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
    work: Pass, node: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    return work.slice(node, work.value(x), dim, start or 0, _END if end is None else end, step)


@rule(_aten.select.int)
def _select(work: Pass, node: fx.Node, x: fx.Node, dim: int, index: int) -> Value:
    value = work.value(x)
    dim %= len(value.dims)
    index %= max(1, size_of(value.dims[dim]))
    result = work.slice(node, value, dim, index, index + 1)
    return replace(result, dims=(*result.dims[:dim], *result.dims[dim + 1 :]))


@rule(_aten.unbind.int)
def _unbind(work: Pass, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[Value, ...]:
    value = work.value(x)
    return tuple(_select(work, node, x, dim, i) for i in range(size_of(value.dims[dim % len(value.dims)])))


@rule(_aten.split.Tensor)
def _split(work: Pass, node: fx.Node, x: fx.Node, size: int, dim: int = 0) -> tuple[Value, ...]:
    value = work.value(x)
    total = size_of(value.dims[dim % len(value.dims)])
    return tuple(work.slice(node, value, dim, at, min(total, at + size)) for at in range(0, total, size))


@rule(_aten.split_with_sizes.default)
def _split_with_sizes(work: Pass, node: fx.Node, x: fx.Node, sizes: Sequence[int], dim: int = 0) -> Any:
    value, at, result = work.value(x), 0, []
    for size in sizes:
        result.append(work.slice(node, value, dim, at, at + size))
        at += size
    return tuple(result)


@rule(_aten.cat.default)
def _cat(work: Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    return work.cat(node, [work.value(t) for t in tensors], dim)


@rule(_aten.stack.default)
def _stack(work: Pass, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    dim %= len(shape_of(node))
    return work.cat(node, [work.unsqueeze(work.value(t), dim) for t in tensors], dim)


@rule(_aten.slice_backward.default)
def _slice_backward(
    work: Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    return work.put(node, work.value(grad), dim % len(sizes), start, end, step, sizes[dim])


@rule(_aten.select_backward.default)
def _select_backward(work: Pass, node: fx.Node, grad: fx.Node, sizes: Sequence[int], dim: int, index: int) -> Value:
    dim %= len(sizes)
    index %= sizes[dim]
    return work.put(node, work.unsqueeze(work.value(grad), dim), dim, index, index + 1, 1, sizes[dim])


@rule(_aten.slice_scatter.default)
def _slice_scatter(
    work: Pass,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    value, dim = work.value(x), dim % len(shape_of(node))
    size = shape_of(node)[dim]
    first = start or 0
    last = min(size, _END if end is None else end)
    if step != 1:
        raise work.refusal(node, f"{called_op(node)} writes to one of every {step} elements")
    parts = [work.value(source)]
    if first:
        parts.insert(0, work.slice(node, value, dim, 0, first))
    if last < size:
        parts.append(work.slice(node, value, dim, last, size))
    return work.cat(node, parts, dim)


@rule(SUM_OP)
def _sum(work: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = work.value(x)
    return work.sum(node, value, _normalize_dims(value, dims))


def _normalize_dims(value: Value, dims: Sequence[int] | None) -> list[int]:
    rank = len(value.dims)
    return list(range(rank)) if dims is None else [d % rank for d in dims]


@rule(_prims.amax.default)
def _amax(work: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = work.value(x)
    return work.extreme(node, value, _normalize_dims(value, dims), largest=True)


@rule(_prims.amin.default)
def _amin(work: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, **_: Any) -> Value:
    value = work.value(x)
    return work.extreme(node, value, _normalize_dims(value, dims), largest=False)


@rule(_prims.var.default)
def _var(
    work: Pass, node: fx.Node, x: fx.Node, dims: Sequence[int] | None = None, correction: float = 1.0, **_: Any
) -> Value:
    """The variance: the mean of the squared distances from the mean."""
    value, dtype = work.value(x), node.meta["val"].dtype
    reduced = _normalize_dims(value, dims)
    count = math.prod(size_of(value.dims[d]) for d in reduced)
    mean = work.apply_prim(node, "div", work.sum(node, value, reduced), float(count), dtype=dtype)
    for d in sorted(reduced):
        mean = work.unsqueeze(mean, d)
    distance = work.apply_prim(node, "sub", value, mean, dtype=dtype)
    squares = work.sum(node, work.apply_prim(node, "mul", distance, distance, dtype=dtype), reduced)
    divisor = max(0.0, count - float(correction))
    return work.apply_prim(node, "div", squares, divisor, dtype=dtype)


@rule(_aten.expand.default)
def _expand(work: Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Value:
    return work.expand(node, work.value(x))


@rule(_prims.broadcast_in_dim.default)
def _broadcast_in_dim(work: Pass, node: fx.Node, x: fx.Node, shape: Sequence[int], positions: Sequence[int]) -> Value:
    value = work.value(x)
    dims: list[Dim] = [()] * len(shape)
    for position, dim in zip(positions, value.dims, strict=True):
        dims[position] = dim
    return work.expand(node, replace(value, dims=tuple(dims)))


@rule(_aten.permute.default, _prims.transpose.default)
def _permute(work: Pass, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Value:
    value = work.value(x)
    return work.permute(node, value, [d % len(value.dims) for d in order])


@rule(_aten.transpose.int)
def _transpose(work: Pass, node: fx.Node, x: fx.Node, dim: int, other_dim: int) -> Value:
    value = work.value(x)
    order = list(range(len(value.dims)))
    order[dim], order[other_dim] = order[other_dim], order[dim]
    return work.permute(node, value, order)


@rule(_aten.t.default)
def _t(work: Pass, node: fx.Node, x: fx.Node) -> Value:
    value = work.value(x)
    return work.permute(node, value, list(reversed(range(len(value.dims)))))


@rule(_aten.lift_fresh_copy.default, _aten.alias.default, _aten.detach.default, _prims.view_of.default)
@rule(_prims.clone.default, _prims.device_put.default)
def _same(work: Pass, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Value:
    return work.value(x)
