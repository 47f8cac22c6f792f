"""Pointwise kernels as operators for compilers and transforms, with fake tensors, gradients and vmap.

An operator refers to its kernel by a text, which is looked up when the operator runs. Where possible, the
launch replaces the operator in a compiler's graph. The launch contains the kernel's source, so it runs in any process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from flexsn_codegen._torch_private_modes import FunctionalTensorMode, before_transforms, is_exporting
from flexsn_codegen.errors import ArgumentError
from flexsn_codegen.functions._autograd import Differentiated, batch_first, by_operator_with, gradients, setup
from flexsn_codegen.functions._by_values import by_values, has_symbols, like
from flexsn_codegen.functions._checks import check_writes_in_graph
from flexsn_codegen.functions._kernel import Kernel, kernel_of
from flexsn_codegen.functions._launch import CPP_BLOCK, addresses_of, interpreted, target_of, target_on
from flexsn_codegen.functions._plan import PlannedLaunch
from flexsn_codegen.targets.cpp import CppKernel, program

# Graphs only contain the source of a program. The most recently used programs stay loaded in this cache.
_program = functools.lru_cache(256)(program)


@torch.library.custom_op(
    "flexsn_codegen::launch_cpp",
    mutates_args=("written",),
    device_types="cpu",
    schema="(Tensor[] read, Tensor(a!)[] written, SymInt[] sizes, str source) -> ()",
)
def launch_cpp(read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], source: str) -> None:
    """Launches a pointwise kernel in C++.

    Args:
        read, written: the kernel's tensors, in order.
        sizes: the kernel's integer arguments. The first one is the number of elements, or of rows in a kernel on rows
            and columns.
        source: result of `CppKernel.text`.
    """
    if sizes[0]:
        _program(source)([*addresses_of([*read, *written]), *sizes, torch.get_num_threads()])


@launch_cpp.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], source: str) -> None:
    pass


@torch.library.custom_op(
    "flexsn_codegen::pointwise",
    mutates_args=(),
    schema="(Tensor[] tensors, Scalar[] numbers, bool[] scalars, str kernel) -> Tensor[]",
)
def pointwise_op(
    tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Sequence[bool], kernel: str
) -> list[Tensor]:
    """Runs a kernel that writes only to new memory.

    Args:
        tensors: all tensors, with the captured tensors last.
        scalars: for each tensor, True if it promotes as a tensor without dimensions.
        kernel: `Kernel.key`.
    """
    result = kernel_of(kernel)
    # The results do not depend on which tensors autograd follows, so False is passed for all tensors.
    results: list[Tensor] = result.run(tensors, numbers, [False] * len(tensors), scalars=scalars)[0]
    return results


@pointwise_op.register_fake
def _(tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Sequence[bool], kernel: str) -> list[Tensor]:
    target = target_of(tensors[0].device)
    results: list[Tensor] = kernel_of(kernel).empty_results(tensors, like(numbers), target, scalars)
    return results


@torch.library.custom_op(
    "flexsn_codegen::pointwise_",
    mutates_args=("written",),
    schema="(Tensor[] read, Tensor(a!)[] written, Scalar[] numbers, str kernel) -> Tensor[]",
)
def pointwise_in_place_op(
    read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], kernel: str
) -> list[Tensor]:
    """Runs a kernel that changes some of its tensors. Returns its other results.

    Args:
        read, written: the kernel's tensors, each in order.
        kernel: `Kernel.key`.
    """
    result = kernel_of(kernel)
    tensors = result.merged(read, written)
    results: list[Tensor] = result.run(tensors, numbers, [False] * len(tensors))[0]
    return results


@pointwise_in_place_op.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], kernel: str) -> list[Tensor]:
    result = kernel_of(kernel)
    tensors = result.merged(read, written)
    check_writes_in_graph(result, tensors)
    results: list[Tensor] = result.empty_results(tensors, like(numbers), target_of(tensors[0].device), None)
    return results


def _convert_to_plain(numbers: Sequence[Any]) -> list[int | float]:
    """The current values of numbers that are symbols. The graph is valid for these values only."""
    return [int(n) if isinstance(n, int | torch.SymInt) else float(n) for n in numbers]


# -- gradients ---------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, numbers, scalars, key = inputs
    setup(ctx, kernel_of(key), numbers, scalars, tensors, output, [t.requires_grad for t in tensors])


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    def apply(kernel: Kernel, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = pointwise_op(tensors, ctx.numbers, scalars, kernel.key)
        return result

    # The gradients have the structure of the arguments, in which an empty list counts as a list of tensors.
    rest: tuple[Any, ...] = (None if ctx.numbers else [], None, None)
    return list(gradients(ctx, ctx.saved_tensors, grads, ctx.needs_input_grad[0], apply)), *rest


pointwise_op.register_autograd(_backward, setup_context=_setup)
by_operator_with(pointwise_op)


def _call_transformed(
    tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Sequence[bool], key: str
) -> list[Tensor]:
    results: tuple[Tensor, ...] = Differentiated.apply(kernel_of(key), tuple(numbers), tuple(scalars), *tensors)
    return list(results)


before_transforms("pointwise", _call_transformed)


# -- vmap of kernels that write ----------------------------------------------------------------------------


@pointwise_in_place_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    read, written, numbers, kernel = args
    read_dims = in_dims[0] or [None] * len(read)
    written_dims = in_dims[1] or [None] * len(written)
    if any(dim is None for dim in written_dims):
        raise ArgumentError(
            f"{kernel_of(kernel).name} writes to a tensor without a batch dimension, once for each element of "
            "vmap's batch. Give this tensor a batch dimension."
        )
    first = batch_first([*read, *written], [*read_dims, *written_dims])
    results = pointwise_in_place_op(first[: len(read)], first[len(read) :], numbers, kernel)
    return results, [0] * len(results)


# -- launches in a compiler's graph --------------------------------------------------------------------------


def _is_direct(device: torch.device) -> bool:
    """True if a graph can contain the launch itself.

    An exported graph cannot contain a launch by Triton, and compiled code cannot call Triton's interpreter.
    """
    if device.type == "cpu":
        return not interpreted()
    return device.type == "cuda" and not is_exporting()


def _lower(kernel: Kernel, tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Any) -> list[Tensor]:
    target = target_on(tensors[0].device, kernel.name)
    constants = _convert_to_plain(numbers)
    trace = kernel.variant(tensors, constants, [False] * len(tensors), target, scalars)
    plan, words = trace.plan(tensors), trace.words(constants)
    new = plan.allocate(tensors[0])
    for launch in plan.launches:
        _record(launch, [*tensors, *new], words[launch.step])
    return new


def _record(launch: PlannedLaunch, all_tensors: Sequence[Tensor], words: Sequence[int]) -> None:
    kernel, tensors, numbers = launch.built.compiled(), launch.tensors(all_tensors), [*launch.integers, *words]
    if isinstance(kernel, CppKernel):
        text = kernel.text(tuple(t.dtype for t in tensors), CPP_BLOCK, fast_math=launch.fast_math)
        first = kernel.first_written
        launch_cpp(tensors[:first], tensors[first:], numbers, text)
        return
    from flexsn_codegen.targets.triton._standalone import standalone  # imports triton, which may be absent

    grid = ((launch.numel + launch.block - 1) // launch.block,)
    wrap_triton(standalone(kernel))[grid](*tensors, *numbers, BLOCK=launch.block)


@pointwise_op.register_torch_dispatch(FunctionalTensorMode)
def _(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors, numbers, scalars, key = args
    kernel = kernel_of(key)
    if has_symbols(numbers) and not is_exporting():
        with mode:
            return by_values(kernel, tensors, numbers, scalars, target_of(tensors[0].device))
    if kernel.cuts or not _is_direct(tensors[0].device):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        return _lower(kernel, tensors, numbers, scalars)


@pointwise_in_place_op.register_torch_dispatch(FunctionalTensorMode)
def _(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    read, written, numbers, key = args
    kernel = kernel_of(key)
    tensors = kernel.merged(read, written)
    check_writes_in_graph(kernel, tensors)
    if has_symbols(numbers) or not _is_direct(tensors[0].device):
        # This is also the path for constant numbers, because compilers cannot handle operators that both write to lists
        # and return lists.
        with mode:
            return by_values(kernel, tensors, numbers, None, target_of(tensors[0].device))
    with mode:
        return _lower(kernel, tensors, numbers, None)
