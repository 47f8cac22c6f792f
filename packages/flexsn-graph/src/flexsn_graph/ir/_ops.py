"""Facts about the ops of a lowered function: one row for each op that works element by element, and sets of other ops.

The sets contain views, constants and sums. Each target defines the code of these ops: see `flexsn_codegen.register_op`.
`lowering/_decompositions.py` expresses all other ops in terms of the ops in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from flexsn_graph._torch_private_ops import OpOverload

Op = OpOverload

_aten = torch.ops.aten
_prims = torch.ops.prims

# Each element of the result is an element of the argument, at an address that strides define. Two views are not in this
# set: `view.dtype` works element by element, and `as_strided` depends on the layout of the memory.
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

# Views that are copied into new memory. Only the shape of the result matters.
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

# Ops that fill the result with one number. Maps each op to the position of the number among its arguments, or to `None`
# if the number is 0. The ops ignore the values of their tensor arguments.
FILL_OPS: dict[Op, int | None] = {
    _aten._efficientzerotensor.default: None,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.scalar_tensor.default: 0,
    _prims.full.default: 1,
    _prims.full_like.default: 1,
    _prims.fill.default: 1,
    _prims.scalar_tensor.default: 0,
}

# Ops that return uninitialized memory. They are allowed as long as no op reads this memory.
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

# The gradient of an argument without dimensions is a sum over the elements. The op `terms` turns this gradient into the
# terms of the sum, and the op `uniform` does the reverse. Each op is the adjoint of the other op. See
# `traces/_pointwise.py`.
library = torch.library.Library("flexsn_graph", "DEF")
library.define("terms(Tensor sum, SymInt[] shape) -> Tensor")
library.define("uniform(Tensor terms) -> Tensor")
library.impl("terms", lambda total, shape: total.expand(shape).clone(), "CompositeExplicitAutograd")
library.impl("uniform", lambda terms: terms.flatten()[0].clone(), "CompositeExplicitAutograd")
TERMS: Op = torch.ops.flexsn_graph.terms.default
UNIFORM: Op = torch.ops.flexsn_graph.uniform.default

# Reductions of the last axis of a step, in a graph on the step's elements. See `cells`.
for _name in ("row_sum", "row_max", "row_min"):
    library.define(f"{_name}(Tensor x) -> Tensor")
ROW_SUM: Op = torch.ops.flexsn_graph.row_sum.default
ROW_MAX: Op = torch.ops.flexsn_graph.row_max.default
ROW_MIN: Op = torch.ops.flexsn_graph.row_min.default
ROW_OPS: frozenset[Op] = frozenset({ROW_SUM, ROW_MAX, ROW_MIN})


_ELEMENTWISE_OF_ZERO = frozenset({_prims.neg.default, _prims.convert_element_type.default})


def is_zero(node: fx.Node) -> bool:
    """True for a constant 0 of a lowered graph, and for its views, negations and conversions."""
    target: Any = node.target
    if target in FILL_OPS:
        position = FILL_OPS[target]
        value = 0 if position is None else node.args[position]
        return isinstance(value, bool | int | float) and value == 0
    return (target in ALIAS_OPS or target in _ELEMENTWISE_OF_ZERO) and is_zero(node.all_input_nodes[0])


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts about an op that works element by element, for all targets.

    Attributes:
        linear: sets of positions of arguments. If the result is floating-point and all other arguments are fixed, the
            op is jointly linear in the arguments of each set.
        continuous: positions of the arguments in which the op has no jumps, if its result is floating-point.
        exact: True if the result needs no rounding to the half dtype of the operands, because this dtype represents the
            result exactly, or because the result has another dtype.
    """

    linear: tuple[frozenset[int], ...] = ()
    continuous: frozenset[int] = frozenset()
    exact: bool = False


_FACTS: dict[Op, OpFacts] = {}


def register_facts(op: Op, facts: OpFacts) -> None:
    """Adds or replaces the facts about an op. Lowering then leaves calls of the op as they are."""
    _FACTS[op] = facts


def facts_of(op: object) -> OpFacts | None:
    """Returns the facts about an op. `None` if the op mixes elements or has no row in the table."""
    return _FACTS.get(op)  # type: ignore[call-overload, no-any-return]


def known_ops() -> tuple[Op, ...]:
    """The ops that have facts, sorted by name."""
    return tuple(sorted(_FACTS, key=str))


def kept_ops() -> Iterator[Op]:
    """The ops that lowering leaves as they are: views, and ops with facts."""
    return chain(VIEW_OPS, _FACTS)


def is_pointwise(op: object) -> bool:
    """True if `op` maps elements to elements, one by one.

    The result is True for all ops outside of torch's own namespaces. The shapes of such ops' results are checked, and
    the ops' kernel rules define their meaning.
    """
    return op in _FACTS or (isinstance(op, Op) and op.namespace not in {"aten", "prims"})


def lacks_a_rule(op: object) -> bool:
    """True if `op` works element by element, but has no row of facts."""
    return isinstance(op, Op) and op not in _FACTS and (torch.Tag.pointwise in op.tags or op in _WITHOUT_RULE)


_WITHOUT_RULE = {_prims.cbrt.default}


def _add_rows(
    names: str, *linear: Sequence[int], continuous: Sequence[int] = (), exact: bool = False, namespace: str = "prims"
) -> None:
    """Adds equal rows for several ops, by name."""
    facts = OpFacts(tuple(map(frozenset, linear)), frozenset(continuous), exact)
    for name in names.split():
        register_facts(getattr(getattr(torch.ops, namespace), name).default, facts)


# -- the table -----------------------------------------------------------------------------------------------

_add_rows("add sub", (0, 1), continuous=(0, 1))
_add_rows("mul", (0,), (1,), continuous=(0, 1))
_add_rows("div", (0,), continuous=(0, 1))
_add_rows("neg", (0,), continuous=(0,), exact=True)
_add_rows("convert_element_type", (0,), continuous=(0,))
_add_rows("where", (1, 2), continuous=(1, 2), exact=True)
_add_rows("maximum minimum", continuous=(0, 1), exact=True)
_add_rows("atan cos erf exp reciprocal sin tanh", continuous=(0,))
_add_rows("abs ceil conj_physical floor fmax fmin frexp nextafter round sign trunc", exact=True)
_add_rows(
    """
    acos acosh asin asinh atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and
    bitwise_not bitwise_or bitwise_xor cosh digamma eq erf_inv erfc erfcx exp2 expm1 fmod gcd ge gt hypot igamma
    igammac isfinite le lgamma log log10 log1p log2 lt ndtri ne pow remainder rsqrt shift_left
    shift_right_arithmetic signbit sinh spherical_bessel_j0 sqrt tan zeta
    """
)
# This op returns the bits unchanged, as another dtype of equal width.
register_facts(_aten.view.dtype, OpFacts(exact=True))
# Ops that torch does not decompose. Their integer arguments are not converted.
_add_rows(
    """
    angle polygamma special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1
    """,
    namespace="aten",
)

# Polynomials, called with `(x, degree)`.
POLYNOMIALS = (
    *(f"special_{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *(f"special_{name}" for name in ("hermite_polynomial_h", "hermite_polynomial_he")),
    *(f"special_{name}" for name in ("laguerre_polynomial_l", "legendre_polynomial_p")),
)
_add_rows(" ".join(POLYNOMIALS), namespace="aten")
