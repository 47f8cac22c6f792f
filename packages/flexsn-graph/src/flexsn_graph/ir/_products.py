"""Matrix products, reductions of rows, and other ops that separate the stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph.ir._ops import ALIAS_OPS, SUM_OP, Op

_aten = torch.ops.aten
_prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class ProductFacts:
    """Facts about a matrix product.

    Attributes:
        factors: positions of the two factors among its arguments.
        added: position of the addend, or `None`.
        contracted: for each factor, the dimension over which the product sums. `None` for a convolution, which may
            have any rank.
        batched: True if the first dimension of both factors counts matrices.
    """

    factors: tuple[int, int]
    added: int | None
    contracted: tuple[int, int] | None
    batched: bool = False


CONVOLUTION: Op = _aten.convolution.default
# Each op has an overload that writes to memory that is passed as `out`.
PRODUCTS: dict[Op, ProductFacts] = {
    _aten.mm.default: ProductFacts((0, 1), None, (1, 0)),
    _aten.addmm.default: ProductFacts((1, 2), 0, (1, 0)),
    _aten.bmm.default: ProductFacts((0, 1), None, (2, 1), batched=True),
    _aten.baddbmm.default: ProductFacts((1, 2), 0, (2, 1), batched=True),
    _aten.mv.default: ProductFacts((0, 1), None, (1, 0)),
    _aten.addmv.default: ProductFacts((1, 2), 0, (1, 0)),
    CONVOLUTION: ProductFacts((0, 1), 2, None),
}

# Reductions of rows of a step, with arguments `(value, dims, *numbers)`. Each op has an overload that writes to memory
# that is passed as `out`.
REDUCTIONS: frozenset[Op] = frozenset(
    {SUM_OP, _prims.amax.default, _prims.amin.default, _prims.var.default},
)

# Joins values. A gradient contains this op if the core splits a value.
CAT_OP: Op = _aten.cat.default
# The gradient of a value of which only a part is used. The gradient is zero outside of this part.
SLICE_BACKWARD_OP: Op = _aten.slice_backward.default
SELECT_BACKWARD_OP: Op = _aten.select_backward.default
# Copies a value for a view that strides cannot express.
COPY_OP: Op = _prims.clone.default
ASSEMBLIES = frozenset({CAT_OP, SLICE_BACKWARD_OP, SELECT_BACKWARD_OP, COPY_OP})

# Ops that are not decomposed in a step that may have products.
KEPT_OPS = ASSEMBLIES | PRODUCTS.keys() | {_aten.convolution_backward.default}


def convolution_weight(
    gradient: Tensor,
    value: Tensor,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's weight.

    Args:
        gradient: gradient of the convolution's result.
        value: the argument that is convolved.
        weight_shape, stride, padding, dilation, transposed, output_padding, groups: parameters of the convolution.
    """
    weight = gradient.new_empty(1).expand(tuple(weight_shape))
    numbers = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)
    result: Tensor = _aten.convolution_backward.default(gradient, value, weight, None, *numbers, [False, True, False])[
        1
    ]
    return result


def reduced_dims(node: fx.Node) -> tuple[int, ...]:
    """The dimensions with more than one element that a node of `REDUCTIONS` reduces."""
    value = node.all_input_nodes[0].meta["val"]
    dims: Any = node.args[1]
    return tuple(d for d in dims if value.shape[d] != 1)


def reduces(node: fx.Node) -> bool:
    """True if a node is a reduction. A sum over one element does not count."""
    return node.target in REDUCTIONS and (node.target is not SUM_OP or bool(reduced_dims(node)))


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A call of an op whose first argument is a value: the op, its other arguments, and its keyword arguments."""


def replay(calls: Sequence[Call], value: Any) -> Any:
    """Applies calls to a value, one after the other."""
    for target, args, kwargs in calls:
        if target in _TO_SHAPE:
            value = value.view(args[0])
        elif target is _prims.collapse.default:
            value = value.view(_collapse_shape(value, *args))
        else:
            value = target(value, *args, **kwargs)
    return value


_TO_SHAPE = frozenset({_aten._unsafe_view.default, _prims.reshape.default})


def _collapse_shape(value: Tensor, start: int, end: int) -> list[int]:
    """The shape of a tensor after the dimensions from `start` to `end` are merged."""
    shape = list(value.shape)
    size = 1
    for n in shape[start : end + 1]:
        size *= n
    return [*shape[:start], size, *shape[end + 1 :]]


def call_of(node: fx.Node) -> Call:
    """The call that a node makes. Only the first argument may be a node."""
    return node.target, tuple(node.args[1:]), dict(node.kwargs)


def is_linear_in_one(node: fx.Node) -> bool:
    """True if a node is linear in its first argument and has no other argument that is a node."""
    target: Any = node.target
    if len(node.all_input_nodes) != 1 or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if target in ALIAS_OPS or target is SUM_OP or target in (_prims.neg.default, _prims.convert_element_type.default):
        return True
    return target in (_prims.mul.default, _prims.div.default)  # the other operand is a number
