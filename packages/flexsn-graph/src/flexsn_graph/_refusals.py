"""Refuses, by name and line, what a scan cannot honour in an op that a core calls."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexsn_graph._core import complex_error
from flexsn_graph._location import SourceLocation
from flexsn_graph._ops import Op
from flexsn_graph.errors import (
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    UnsupportedCoreError,
)

_aten = torch.ops.aten

_DATA_DEPENDENT_OPS = frozenset(
    {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
)

# They hand a tensor's values to Python or NumPy without passing the dispatcher.
VALUE_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})


def reads_value(name: str, location: SourceLocation | None) -> DataDependentError:
    """The error for Python code that depends on a tensor's value."""
    return DataDependentError(
        f"the core reads a tensor's value in Python ({name}): `if`, `while`, `.item()` and "
        "`float()` on a tensor cannot be compiled. Use `torch.where`.",
        name,
        location,
    )


def refuse_higher_order(func: Any, location: SourceLocation | None) -> None:
    """Refuses what is no op: `torch.cond` and the like."""
    if not isinstance(func, Op):
        raise UnsupportedCoreError(
            f"the core calls the higher-order operator {func}: it cannot be part of a step function. "
            "Use `torch.where`.",
            str(func),
            location,
        )


def refuse_op(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frozen: Container[int],
    location: SourceLocation | None,
) -> None:
    """Refuses an op for what it is, or for writing to one of the storages `frozen`."""
    name = str(op)
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise RandomOpError(
            f"the core calls {name}: random ops are not supported, because the backward pass "
            "recomputes the step. Draw the numbers outside and pass them as an input sequence.",
            name,
            location,
        )
    if op in _DATA_DEPENDENT_OPS or torch.Tag.data_dependent_output in op.tags:
        raise reads_value(name, location)
    if torch.Tag.dynamic_output_shape in op.tags and not _indexes_by_number(op, args):
        raise NonPointwiseError(
            f"the core picks elements by index or mask ({name}): a step function must work on each "
            "element of the step by itself. Use `torch.where` for masks.",
            name,
            location,
        )
    if not op._schema.is_mutable:
        return
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for written in pytree.tree_leaves(value):  # `torch._foreach_*` write to lists
            if isinstance(written, Tensor) and storage_of(written) in frozen:
                raise MutationError(
                    "the core changes an input, a state, a captured tensor or an incoming gradient in "
                    f"place ({name}). Return the new value instead; in-place ops on values that the "
                    "core made are fine.",
                    name,
                    location,
                )


def _indexes_by_number(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on no mask. (If the step does it, it is refused later.)"""
    masks = (torch.bool, torch.uint8)
    return op is _aten.index.Tensor and not any(i is not None and i.dtype in masks for i in args[1])


def refuse_complex(values: Any, name: str, location: SourceLocation | None) -> None:
    """Refuses complex tensors among an op's arguments and results."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.is_complex():
            raise complex_error(name, value.dtype, location)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)
