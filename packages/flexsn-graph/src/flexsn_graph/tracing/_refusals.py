"""Refuses ops that a scan cannot contain. Each error names the op and the user's line."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import SourceLocation, called_op, location_of
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.errors import (
    DataDependentError,
    MutationError,
    NonPointwiseError,
    RandomOpError,
    UnsupportedCoreError,
)
from flexsn_graph.ir._ops import Op, lacks_a_rule
from flexsn_graph.tracing._core import complex_error

_aten = torch.ops.aten

_DATA_DEPENDENT_OPS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})

# Functions that pass a tensor's values to Python or NumPy without the dispatcher.
VALUE_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})

# Properties of a tensor that can be read during a trace, but may differ in later calls.
_ONCE = """
    requires_grad is_leaf grad_fn grad retains_grad _version _base output_nr
    data_ptr storage_offset stride is_contiguous is_pinned is_shared is_inference untyped_storage _is_view is_set_to
    __repr__ __format__
"""
READ_ONCE = {(d if callable(d) else d.__get__): n for n in _ONCE.split() for d in [getattr(Tensor, n)]}


def make_value_error(name: str, location: SourceLocation | None) -> DataDependentError:
    """The error for Python code that depends on a tensor's value."""
    return DataDependentError(
        f"the core reads a tensor's value in Python ({name}): `if`, `while`, `.item()` and "
        "`float()` on a tensor cannot be compiled. Use `torch.where`. A tensor's value is also read if it is passed "
        "where torch expects a number, such as `alpha=` of `torch.add`: multiply by the tensor instead.",
        name,
        location,
    )


# A hook would run once in the trace, on one step's gradient, and again on the sum of all steps' gradients.
HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad})


def make_hook_error(name: str, location: SourceLocation | None) -> UnsupportedCoreError:
    """The error for a hook on a captured tensor, or on a value computed from captured tensors alone."""
    return UnsupportedCoreError(
        f"the core calls Tensor.{name} on a captured tensor, or on a value computed from captured tensors alone: "
        "kernels compute this gradient as a sum over all steps. Add the hook to the captured tensor, outside of the "
        "core.",
        f"Tensor.{name}",
        location,
    )


def make_out_error(name: str, location: SourceLocation | None) -> UnsupportedCoreError:
    """The error for `out=` with tensors that require gradients. Autograd does not record such a call."""
    return UnsupportedCoreError(
        f"the core calls {name} with out=, which autograd does not differentiate. Assign its result, or write it with "
        "`.copy_()`.",
        f"{name}(out=...)",
        location,
    )


def refuse_without_rule(node: fx.Node) -> None:
    """Refuses an op that works element by element, but has no rule for kernels."""
    if lacks_a_rule(node.target):
        raise UnsupportedCoreError(
            f"{called_op(node)} has no rule. Write it in other ops, or add one with flexsn_codegen.register_op.",
            called_op(node),
            location_of(node),
        )


def refuse_higher_order(func: Any, location: SourceLocation | None) -> None:
    """Refuses higher-order operators such as `torch.cond`."""
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
    """Refuses ops that are random, read values into Python, pick elements by mask, or write to memory in `frozen`."""
    name = str(op)
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise RandomOpError(
            f"the core calls {name}: random ops are not supported, because the backward pass "
            "recomputes the step. Draw in the step with normal_like, uniform_like or bernoulli_like of "
            "flexsn_nn.random, whose numbers are the same each time, or draw outside of the core and pass the numbers "
            "as an input sequence.",
            name,
            location,
        )
    if op in _DATA_DEPENDENT_OPS or torch.Tag.data_dependent_output in op.tags:
        raise make_value_error(name, location)
    if torch.Tag.dynamic_output_shape in op.tags and not _indexes_by_number(op, args):
        raise NonPointwiseError(
            f"the core picks elements by index or mask ({name}): a step function must work on each "
            "element of the step by itself. Use `torch.where` for masks.",
            name,
            location,
        )
    for written in written_by(op, args, kwargs):
        if storage_of(written) in frozen:
            raise MutationError(
                "the core changes an input, a state, a captured tensor, a value computed from captured tensors before "
                f"the loop, or an incoming gradient in place ({name}). Return the new value instead, or change a "
                "copy: in-place ops on values that the core made in the step are allowed.",
                name,
                location,
            )


def written_by(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an op writes to."""
    if not op._schema.is_mutable:
        return []
    written: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            # The ops `torch._foreach_*` write to lists of tensors.
            written += pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in written if isinstance(t, Tensor)]


def _indexes_by_number(op: Op, args: tuple[Any, ...]) -> bool:
    """True if the shape of the result does not depend on a mask. Indexing within a step is refused later."""
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
