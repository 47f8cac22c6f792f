"""Lowers the recorded graph of a step on pieces of its values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from flexsn_graph.cells import CUTTING_OPS, Elements, in_elements
from flexsn_graph.ir._products import PRODUCTS
from flexsn_graph.tracing._tracer import Tracer

# Ops that are not decomposed in a step that cuts dimensions. `index_put` is excluded, because a write through a mask is
# pointwise.
CUT_IN_STEPS = (CUTTING_OPS | PRODUCTS.keys()) - {torch.ops.aten.index_put.default}


def elements_of(
    tracer: Tracer,
    recorded: fx.GraphModule,
    step_shape: Sequence[int],
    positions: Sequence[int | None] = (),
    forward_elements: Elements | None = None,
) -> Elements:
    """Turns the recorded graph into a step on elements. For the other arguments, see `Tracer.lower`.

    Args:
        forward_elements: the elements of the step's forward if `recorded` is a VJP, otherwise `None`.
    """
    lowered = tracer.lowered(recorded, CUT_IN_STEPS)
    roles, gradient_of = tracer.roles(lowered, positions)
    return in_elements(
        lowered, step_shape, roles, gradient_of, None if forward_elements is None else forward_elements.refined
    )
