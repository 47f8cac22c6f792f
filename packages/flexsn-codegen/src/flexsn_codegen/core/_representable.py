"""Finds values that need no rounding to float16 or bfloat16, because the dtype can represent them exactly."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from flexsn_codegen.source._dtypes import HALF_DTYPES
from flexsn_codegen.source._numbers import LITERAL_OPS

_prims = torch.ops.prims
# Ops whose result is an operand's value, possibly negated or rounded to an integer, or the sign of an operand.
_SELECTS = frozenset(
    getattr(_prims, name).default
    for name in ["abs", "ceil", "floor", "fmax", "fmin", "maximum", "minimum", "neg", "round", "sign", "trunc", "where"]
)


def needs_rounding(node: fx.Node, *, number_arguments: bool) -> bool:
    """False if a node converts its operand to a half dtype that can represent all values of the operand exactly.

    Args:
        node: a node of a graph in which the result of each op is rounded to its dtype.
        number_arguments: True if the graph's numbers are arguments, so that their values are unknown.
    """
    dtype = node.meta["val"].dtype
    if node.target is not _prims.convert_element_type.default or dtype not in HALF_DTYPES:
        return True
    (operand,) = node.all_input_nodes
    return not _is_representable(operand, dtype, number_arguments)


def _is_representable(value: object, dtype: torch.dtype, number_arguments: bool) -> bool:
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and not number_arguments and _is_number_of(value, dtype)
    fake = value.meta["val"]
    if not isinstance(fake, Tensor):
        return False
    if fake.dtype in (dtype, torch.bool):
        return True
    if value.target in LITERAL_OPS:
        return _is_representable(value.args[0], dtype, number_arguments)
    if value.target is _prims.convert_element_type.default:
        # `dtype` can represent the results of a floating-point conversion if it can represent the operand's values,
        # except that bfloat16 rounds float16 values from 65408 to 65536, which is infinite in float16.
        (operand,) = value.all_input_nodes
        may_overflow = fake.dtype == torch.bfloat16 and dtype == torch.float16
        return fake.dtype.is_floating_point and not may_overflow and _is_representable(operand, dtype, number_arguments)
    operands = value.args[1:] if value.target is _prims.where.default else value.args
    return value.target in _SELECTS and all(_is_representable(a, dtype, number_arguments) for a in operands)


def _is_number_of(value: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(value, dtype=dtype, device="cpu") == value)
