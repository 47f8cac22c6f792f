"""Translates functions that cut a dimension into halves, thirds, channels or pairs. Each piece is called a *cell*.

`x1, x2 = x.chunk(2, -1)` and `torch.cat((-x2, x1), -1)` move elements to other positions of the same row. A kernel does
not have to move elements: it counts the elements of one half, and each half of `x` is an operand with its own strides.
For this purpose, a dimension of `n` elements is described as a product of factors, outermost first. An *axis* is a
factor that the kernel counts. *Cells* form a factor that is written out, with a separate operand or value for each
cell. For example, two halves are `(2 cells, axis of n/2)`, even and odd elements are `(axis of n/2, 2 cells)`, and the
channels of an image are `(3 cells)`.

The ops of the function determine the factors of each dimension. The factors are found by trial: at first, each
dimension is one axis. An op that cuts the axis raises `Refined`, and the pass starts again with the factors in this
exception. Two axes that an op combines become one axis. No value may have the same axis twice, because the kernel has
only one count for each axis.
"""

from __future__ import annotations

import torch
from torch import fx

from flexsn_graph.cells import _products, _rules, _tables  # noqa: F401  registers the rules of ops
from flexsn_graph.cells._parts import Axis, CellModule, CellResult, Cells, CutModule, Part
from flexsn_graph.cells._pass import MAX_CELLS, Pass
from flexsn_graph.cells._pieces import Pieces, StepPieces
from flexsn_graph.cells._steps import Elements, in_elements, pieces_of
from flexsn_graph.cells._values import Key, Refined, Spec

__all__ = [
    "CUTTING_OPS",
    "MAX_CELLS",
    "Axis",
    "CellModule",
    "CellResult",
    "Cells",
    "CutModule",
    "Elements",
    "Part",
    "Pieces",
    "StepPieces",
    "in_cells",
    "in_elements",
    "pieces_of",
]

_MAX_ATTEMPTS = 256

_aten = torch.ops.aten

# Ops that cut or join tensors. These ops are not decomposed.
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


def in_cells(module: fx.GraphModule, *, sums_allowed: bool, rows: bool = False) -> CutModule:
    """Turns a lowered graph with views and cuts into graphs on the elements of a step.

    Args:
        sums_allowed: True if the graph computes gradients. Sums over elements are then computed after the kernel.
        rows: for a graph that computes gradients, True if the kernel itself may reduce one dimension: the last
            dimension of the reduced value. Kernels of other graphs may always reduce this dimension.

    Raises:
        NonPointwiseError: the graph mixes elements in a way other than cutting and joining tensors.
    """
    refined: dict[Key, tuple[Spec, ...]] = {}
    blamed: dict[Key, fx.Node] = {}
    for _ in range(_MAX_ATTEMPTS):
        try:
            return Pass(module, refined, blamed, sums_allowed, rows).run()
        except Refined as refinement:
            refined[refinement.key], blamed[refinement.key] = refinement.factors, refinement.node
    raise AssertionError("the factors of the dimensions were not found")
