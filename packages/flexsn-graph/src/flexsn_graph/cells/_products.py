"""Products of small dimensions, written out as ordered sums of products of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flexsn_graph.cells._registry import rule
from flexsn_graph.cells._values import Value
from flexsn_graph.ir._products import PRODUCTS

if TYPE_CHECKING:
    from flexsn_graph.cells._pass import Pass

_aten, _prims = torch.ops.aten, torch.ops.prims
_HALF_DTYPES = (torch.float16, torch.bfloat16)


@rule(*(op for op, facts in PRODUCTS.items() if facts.contracted is not None))
def _product(cell_pass: Pass, node: fx.Node, *args: fx.Node, beta: Any = 1, alpha: Any = 1) -> Value:
    target: Any = node.target
    facts = PRODUCTS[target]
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in _HALF_DTYPES else dtype
    left, right = (_convert(cell_pass, node, cell_pass.value(args[i]), wide) for i in facts.factors)
    assert facts.contracted is not None
    dim = facts.contracted[0]  # the last dimension of the left factor
    if len(right.dims) > dim:  # the right factor is a matrix, not a vector
        left = cell_pass.unsqueeze(left, len(left.dims))
        right = cell_pass.unsqueeze(right, dim - 1)
    product = cell_pass.sum(node, cell_pass.apply_prim(node, "mul", left, right, dtype=wide), [dim])
    if alpha != 1:
        product = cell_pass.apply_prim(node, "mul", product, alpha, dtype=wide)
    if facts.added is not None and beta != 0:
        added = _convert(cell_pass, node, cell_pass.value(args[facts.added]), wide)
        if beta != 1:
            added = cell_pass.apply_prim(node, "mul", added, beta, dtype=wide)
        product = cell_pass.apply_prim(node, "add", added, product, dtype=wide)
    return _convert(cell_pass, node, product, dtype)


def _convert(cell_pass: Pass, node: fx.Node, value: Value, dtype: torch.dtype) -> Value:
    like: Tensor = value.nodes[0].meta["val"]
    return value if like.dtype == dtype else cell_pass.apply_prim(node, "convert_element_type", value, dtype=dtype)
