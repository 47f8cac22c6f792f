"""What the ops of a lowered step mean for a scan: views, constants, sums, and the pointwise set."""

from __future__ import annotations

import torch

from flexsn_graph._torch_private_ops import OpOverload

Op = OpOverload

_aten = torch.ops.aten
_prims = torch.ops.prims

# Each element of the result is an element of the argument, found through strides. `view.dtype` and
# `as_strided` are not here: the one changes values, the other depends on how the memory is laid out.
VIEW_OPS: frozenset[Op] = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _prims.broadcast_in_dim.default,
        _prims.collapse_view.default,
        _prims.split_dim.default,
        _prims.squeeze.default,
        _prims.transpose.default,
        _prims.view_of.default,
    }
)

# The same, in memory of its own: only the shape of the result matters.
RESHAPE_OPS: frozenset[Op] = frozenset(
    {
        _aten._unsafe_view.default,
        _aten.lift_fresh_copy.default,
        _prims.clone.default,
        _prims.collapse.default,
        _prims.device_put.default,
        _prims.reshape.default,
    }
)

ALIAS_OPS = VIEW_OPS | RESHAPE_OPS

# Filled with one value whatever their tensor argument holds: `(op, position of the value)`.
FILL_OPS: dict[Op, int] = {
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
    _prims.full.default: 1,
    _prims.full_like.default: 1,
    _prims.fill.default: 1,
    _prims.scalar_tensor.default: 0,
}

# Memory that nobody has written to; allowed as long as nobody reads it.
EMPTY_OPS: frozenset[Op] = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_permuted.default,
        _aten.empty_strided.default,
        _prims.empty.default,
        _prims.empty_permuted.default,
        _prims.empty_strided.default,
    }
)

SUM_OP: Op = _prims.sum.default

_POINTWISE_PRIMS = """
    abs acos acosh add asin asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0
    bessel_j1 bitwise_and bitwise_not bitwise_or bitwise_xor cbrt ceil conj_physical convert_element_type
    cos cosh digamma div eq erf erf_inv erfc erfcx exp exp2 expm1 floor fmax fmin fmod frexp gcd ge gt
    hypot igamma igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ndtri ne neg
    nextafter pow reciprocal remainder round rsqrt shift_left shift_right_arithmetic sign signbit sin
    sinh spherical_bessel_j0 sqrt sub tan tanh trunc where zeta
"""

POINTWISE_OPS: frozenset[Op] = frozenset(
    overload
    for name in _POINTWISE_PRIMS.split()
    if (packet := getattr(_prims, name, None)) is not None
    for overload in (getattr(packet, o) for o in packet.overloads())
)


def is_pointwise(op: object) -> bool:
    """Whether `op` maps elements to elements, one by one.

    Ops of other namespaces than torch's own are given the benefit of the doubt (their shapes are
    compared): whoever has a kernel rule for them knows what they are.
    """
    if op in POINTWISE_OPS:
        return True
    return isinstance(op, Op) and op.namespace not in {"aten", "prims"}
