"""An operator for pointwise kernels whose numbers are computed by a compiled graph. Floats are passed as tensors.

A compiler turns a number that changes, such as a learning rate, into a symbol. Floats that are symbols have to be
passed in tensors, because otherwise the graph is valid for one value only. When the kernel runs, its arguments are
computed from these numbers, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import hint_of
from flexsn_codegen.errors import TraceError
from flexsn_codegen.functions._kernel import Kernel, kernel_of
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.targets import Target


def has_symbols(numbers: Sequence[Any]) -> bool:
    """True if any number is a compiler's symbol."""
    return any(type(number) in (torch.SymInt, torch.SymFloat) for number in numbers)


def like(numbers: Sequence[Any]) -> list[int | float]:
    """The numbers, with each symbol replaced by its value in the call that is compiled."""
    return [hint_of(number) if type(number) in (torch.SymInt, torch.SymFloat) else number for number in numbers]


@torch.library.custom_op(
    "flexsn_codegen::pointwise_by_values",
    mutates_args=("changed",),
    schema="(Tensor[] read, Tensor(a!)[] changed, Tensor[] floats, SymInt[] ints, bool[] is_float, bool[] scalars, "
    "str kernel) -> ()",
)
def pointwise_by_values_op(
    read: Sequence[Tensor],
    changed: Sequence[Tensor],
    floats: Sequence[Tensor],
    ints: Sequence[int],
    is_float: Sequence[bool],
    scalars: Sequence[bool],
    kernel: str,
) -> None:
    """Runs a kernel.

    Args:
        read: the tensors that the kernel only reads.
        changed: the tensors to which the kernel writes, followed by its results.
        floats: the floating-point numbers in order, as float64 tensors `[]` on the CPU.
        ints: the other numbers.
        is_float: for each number, True if it is in `floats`.
        scalars: see `pointwise_op`. If empty, True for the tensors without dimensions.
        kernel: `Kernel.key`.
    """
    result = kernel_of(kernel)
    count = len(result.written)
    tensors, outs = result.merged(read, changed[:count]), changed[count:]
    numbers = merge_by_type(floats, ints, is_float)
    requested = [False] * len(tensors)
    target = target_on(tensors[0].device, result.name)
    dtypes = list(result.variant(tensors, numbers, requested, target, scalars or None).dtypes)
    if dtypes != [out.dtype for out in outs]:
        raise TraceError(
            f"{result.name} returns {dtypes} for {numbers}, but {[out.dtype for out in outs]} for the numbers for "
            "which the graph was compiled. A value that determines the dtypes of results has to be a constant of the "
            "graph: a bool or a text, not a number."
        )
    result.run(tensors, numbers, requested, outs, scalars or None)


def returns_nothing(*arguments: object) -> None:
    """Fake implementation of an operator that only writes to existing tensors."""


pointwise_by_values_op.register_fake(returns_nothing)


def by_values(
    kernel: Kernel,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    scalars: Sequence[bool] | None,
    target: Target,
) -> list[Tensor]:
    """Calls `pointwise_by_values_op` with new memory for the results, and returns the results."""
    results = kernel.empty_results(tensors, like(numbers), target, scalars)
    read = [t for i, t in enumerate(tensors) if i not in kernel.written]
    changed = [*(tensors[i] for i in kernel.written), *results]
    floats, ints, is_float = split_by_type(numbers)
    pointwise_by_values_op(read, changed, floats, ints, is_float, list(scalars or ()), kernel.key)
    return results


def split_by_type(numbers: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[bool]]:
    """Returns the floats as tensors, the other numbers, and for each number, True if it is a float."""
    is_float = [isinstance(number, float | torch.SymFloat) for number in numbers]
    pairs = list(zip(numbers, is_float, strict=True))
    unit = torch.ones((), dtype=torch.float64, device="cpu")
    # Each number is multiplied by a tensor, because compilers can compute this product from the tensors in which the
    # numbers were passed.
    return (
        [unit * number for number, is_float_number in pairs if is_float_number],
        [number for number, is_float_number in pairs if not is_float_number],
        is_float,
    )


def merge_by_type(floats: Sequence[Tensor], ints: Sequence[int], is_float: Sequence[bool]) -> list[int | float]:
    """The numbers in their original order, after `split_by_type` has separated them."""
    float_values, int_values = iter(floats), iter(ints)
    return [next(float_values).item() if is_float_number else next(int_values) for is_float_number in is_float]
