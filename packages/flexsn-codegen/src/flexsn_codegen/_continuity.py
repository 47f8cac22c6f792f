"""Which values of a step may be rounded a little differently without anything jumping.

A gradient is compared with eager to rounding, but a value that is compared with a threshold decides a spike, and
must be what the forward computed. So a division may only be a fast one where its result reaches no comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_prims = torch.ops.prims

_CONTINUOUS = frozenset(
    {
        _prims.add.default,
        _prims.atan.default,
        _prims.convert_element_type.default,
        _prims.cos.default,
        _prims.div.default,
        _prims.erf.default,
        _prims.exp.default,
        _prims.maximum.default,
        _prims.minimum.default,
        _prims.mul.default,
        _prims.neg.default,
        _prims.reciprocal.default,
        _prims.sin.default,
        _prims.sub.default,
        _prims.tanh.default,
        _prims.where.default,
    }
)


def continuous_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose value reaches the results through continuous ops on floating-point values alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if all(user.op == "output" or (user in found and _keeps(user, node)) for user in node.users):
            found.add(node)
    return frozenset(found)


def _keeps(user: fx.Node, node: fx.Node) -> bool:
    value = user.meta.get("val")
    if user.target not in _CONTINUOUS or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return not (user.target is _prims.where.default and user.args[0] is node)
