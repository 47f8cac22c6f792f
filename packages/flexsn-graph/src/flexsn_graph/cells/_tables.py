"""Small tables that are indexed or searched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from flexsn_graph._location import called_op
from flexsn_graph.cells._registry import rule
from flexsn_graph.cells._values import Value, size_of

if TYPE_CHECKING:
    from flexsn_graph.cells._pass import Pass

_aten, _prims = torch.ops.aten, torch.ops.prims


def _find_index(cell_pass: Pass, node: fx.Node, rank: int, indices: Sequence[fx.Node | None]) -> tuple[int, Value]:
    """The dimension that is indexed, and the index, aligned with this dimension."""
    indexed = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(indexed) != 1 or indexed[0][1].meta["val"].dtype not in (torch.int64, torch.int32):
        raise cell_pass.refusal(node, f"{called_op(node)} does not pick elements by integers along one dimension")
    dim, index = indexed[0]
    value = cell_pass.value(index)
    if not value.dims:
        return dim, value
    before, after = ((),) * dim, ((),) * (rank - dim - 1)
    return dim, replace(value, dims=(*before, *value.dims, *after))


def _wrap_indices(cell_pass: Pass, node: fx.Node, index: Value, count: int) -> Value:
    """Replaces each negative index with the equivalent index that is not negative."""
    like = index.nodes[0].meta["val"].dtype
    negative = cell_pass.apply_prim(node, "lt", index, 0, dtype=torch.bool)
    return cell_pass.apply_prim(
        node, "where", negative, cell_pass.apply_prim(node, "add", index, count, dtype=like), index, dtype=like
    )


@rule(_prims.iota.default)
def _iota(cell_pass: Pass, node: fx.Node, length: int, *, start: int, step: int, **_: Any) -> Value:
    if not cell_pass.supports_arange:
        raise cell_pass.refusal(node, f"{called_op(node)} does not work element by element")
    return cell_pass.from_numbers(node, [start + step * i for i in range(length)])


@rule(_aten.index.Tensor)
def _index(cell_pass: Pass, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> Value:
    """`table[index]`: each entry of the table is an operand, and a chain of `where` selects an entry."""
    table = cell_pass.value(x)
    dim, index = _find_index(cell_pass, node, len(table.dims), indices)
    count = size_of(table.dims[dim])
    index = _wrap_indices(cell_pass, node, index, count)
    new = len(index.dims) - len(table.dims) + 1
    dtype = node.meta["val"].dtype
    # The initial value remains for an index out of range, for which eager mode raises an error.
    result: Any = math.nan if dtype.is_floating_point else 0
    for i in range(count):
        entry = cell_pass.slice(node, table, dim, i, i + 1)
        entry = replace(entry, dims=(*entry.dims[:dim], *((),) * new, *entry.dims[dim + 1 :]))
        is_entry = cell_pass.apply_prim(node, "eq", index, i, dtype=torch.bool)
        result = cell_pass.apply_prim(node, "where", is_entry, entry, result, dtype=dtype)
    return result  # type: ignore[no-any-return]


@rule(_aten.index_put.default)
def _index_put(
    cell_pass: Pass,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> Value:
    """The gradient of `table[index]`: for each entry, the sum of the gradients at the positions that read the entry."""
    table, gradient = cell_pass.value(x), cell_pass.value(values)
    dim, index = _find_index(cell_pass, node, len(table.dims), indices)
    if not accumulate or not table.zero:
        raise cell_pass.refusal(node, f"{called_op(node)} writes to elements at integer indices")
    count = size_of(table.dims[dim])
    index = _wrap_indices(cell_pass, node, index, count)
    new = len(index.dims) - len(table.dims) + 1
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if wide != dtype:
        gradient = cell_pass.apply_prim(node, "convert_element_type", gradient, dtype=wide)
    entries = []
    for i in range(count):
        is_entry = cell_pass.apply_prim(node, "eq", index, i, dtype=torch.bool)
        term = cell_pass.apply_prim(node, "where", is_entry, gradient, 0.0, dtype=wide)
        total = cell_pass.sum(node, term, range(dim, dim + new))
        entries.append(cell_pass.unsqueeze(total, dim))
    joined = cell_pass.cat(node, entries, dim)
    return cell_pass.apply_prim(node, "convert_element_type", joined, dtype=dtype) if wide != dtype else joined


def _count_below(cell_pass: Pass, node: fx.Node, sequence: Value, x: Value, right: bool) -> Value:
    """Counts the entries of a sorted sequence below `x`, or up to `x` if `right`. NaN is greater than all numbers."""
    dtype, total = node.meta["val"].dtype, None
    for i in range(size_of(sequence.dims[0])):
        entry = replace(cell_pass.slice(node, sequence, 0, i, i + 1), dims=())
        beyond = cell_pass.apply_prim(node, "gt" if right else "ge", entry, x, dtype=torch.bool)
        before = cell_pass.apply_prim(node, "bitwise_not", beyond, dtype=torch.bool)
        number = cell_pass.apply_prim(node, "convert_element_type", before, dtype=dtype)
        total = number if total is None else cell_pass.apply_prim(node, "add", total, number, dtype=dtype)
    assert total is not None
    return total


@rule(_aten.bucketize.Tensor)
def _bucketize(
    cell_pass: Pass, node: fx.Node, x: fx.Node, boundaries: fx.Node, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _count_below(cell_pass, node, cell_pass.value(boundaries), cell_pass.value(x), right)


@rule(_aten.searchsorted.Tensor)
def _searchsorted(
    cell_pass: Pass,
    node: fx.Node,
    sequence: fx.Node,
    x: fx.Node,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: fx.Node | None = None,
) -> Value:
    values = cell_pass.value(sequence)
    if len(values.dims) != 1 or sorter is not None:
        raise cell_pass.refusal(node, f"{called_op(node)} searches in more than one sequence")
    return _count_below(cell_pass, node, values, cell_pass.value(x), right or side == "right")
