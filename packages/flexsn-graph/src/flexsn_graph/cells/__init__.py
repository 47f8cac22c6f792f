"""Functions that cut a dimension: halves, thirds, channels, pairs. Each piece is an argument of its own, a *cell*.

`x1, x2 = x.chunk(2, -1)` and `torch.cat((-x2, x1), -1)` read and write other elements of the same row. For a kernel
they are no such thing: it counts the elements of one half, and each half of `x` is an operand with strides. So a
dimension of `n` elements is a product of factors, outermost first: *axes*, which the kernel counts, and *cells*, which
are written out, one operand or value each. Halves are `(2 cells, axis of n/2)`; even and odd elements
`(axis of n/2, 2 cells)`; the channels of an image `(3 cells)`.

How a dimension is made of factors follows from what the function does with it. This is found by trying: each dimension
begins as one axis, and whatever cuts it raises `Refined`, whereupon everything begins again. Two axes that an op
combines are one. No value may then have the same axis twice, or it would be an element and another one at once.
"""

from __future__ import annotations

import torch
from torch import fx

from flexsn_graph.cells import _products, _rules, _tables  # noqa: F401  they say what ops do
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


def in_cells(module: fx.GraphModule, *, sums_allowed: bool, rows: bool = False) -> CutModule:
    """Turns a lowered graph, views and cuts included, into those on elements of a step.

    Args:
        sums_allowed: over elements, which are taken after the kernel: the graph computes gradients.
        rows: reductions of one dimension, the last one of what is reduced, are taken within the kernel.

    Raises:
        NonPointwiseError: it mixes elements otherwise than by cutting and joining.
    """
    refined: dict[Key, tuple[Spec, ...]] = {}
    blamed: dict[Key, fx.Node] = {}
    for _ in range(_MAX_ATTEMPTS):
        try:
            return Pass(module, refined, blamed, sums_allowed, rows).run()
        except Refined as one:
            refined[one.key], blamed[one.key] = one.factors, one.node
    raise AssertionError("the factors of the dimensions are not found")
