"""Pointwise kernels as operators, for compilers and transforms: with fake tensors, gradients and vmap.

An operator names its kernel by a text, which is looked up when it runs. While a graph is made for a compiler, it is
replaced by the launch itself, which holds the kernel's source: that runs in any process.
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
from flexsn_codegen.functions._by_values import by_values, has_symbols, like
from flexsn_codegen.functions._checks import check_writes_in_graph
from flexsn_codegen.functions._cut import CutFunction
from flexsn_codegen.functions._forward_mode import tangents_of
from flexsn_codegen.functions._kernel import Kernel, Launch, kernel_of
from flexsn_codegen.functions._launch import BLOCK, CPP_BLOCK, addresses_of, interpreted, target_of, target_on
from flexsn_codegen.targets.cpp import CppKernel, program

# Graphs hold the source alone: their libraries stay open as long as they are among the last ones used.
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
        read, written: its tensors, in order.
        sizes: its integer arguments; the first is the number of elements.
        source: from `CppKernel.text`.
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
    """Runs a kernel that writes new memory alone.

    Args:
        tensors: all of them, the captured ones last.
        scalars: for each, whether it promotes as a tensor without dimensions.
        kernel: `Kernel.key`.
    """
    found = kernel_of(kernel)
    # What autograd would follow decides nothing here: the results are the same.
    results: list[Tensor] = found.run(tensors, numbers, [False] * len(tensors), scalars=scalars)[0]
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
    """Runs a kernel that changes some of its tensors; returns its other results.

    Args:
        read, written: its tensors, each in order.
        kernel: `Kernel.key`.
    """
    found = kernel_of(kernel)
    tensors = found.merged(read, written)
    results: list[Tensor] = found.run(tensors, numbers, [False] * len(tensors))[0]
    return results


@pointwise_in_place_op.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], kernel: str) -> list[Tensor]:
    found = kernel_of(kernel)
    tensors = found.merged(read, written)
    check_writes_in_graph(found, tensors)
    results: list[Tensor] = found.empty_results(tensors, like(numbers), target_of(tensors[0].device), None)
    return results


def _plain(numbers: Sequence[Any]) -> list[int | float]:
    """Numbers that are symbols, as they are now: the graph is for these alone."""
    return [int(n) if isinstance(n, int | torch.SymInt) else float(n) for n in numbers]


# -- gradients ---------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, numbers, scalars, key = inputs
    kernel = kernel_of(key)
    wanted = [t.requires_grad for t in tensors]
    variant = kernel.variant(tensors, like(numbers), wanted, target_of(tensors[0].device), scalars)
    ctx.kernel, ctx.numbers, ctx.scalars = kernel, numbers, list(scalars)
    ctx.differentiable = variant.traced.differentiable
    ctx.mark_non_differentiable(*(t for t, flows in zip(output, ctx.differentiable, strict=True) if not flows))
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    wanted = list(ctx.needs_input_grad[0])
    pairs = zip(grads, ctx.differentiable, strict=True)
    there = [flows and g is not None for g, flows in pairs]
    given = [g for g, flows in zip(grads, there, strict=True) if g is not None and flows]
    # What is given back has the structure of the arguments, in which an empty list is one of tensors.
    rest: tuple[Any, ...] = (None if ctx.numbers else [], None, None)
    if not given or not any(wanted):
        return [None] * len(tensors), *rest
    gradient = ctx.kernel.gradient(wanted, there)
    scalars = [*ctx.scalars, *[False] * len(given)]
    found = iter(pointwise_op([*tensors, *given], ctx.numbers, scalars, gradient.key))
    return [_like(next(found), t) if want else None for t, want in zip(tensors, wanted, strict=True)], *rest


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    return gradient.sum_to_size(tensor.shape).to(tensor.dtype)


pointwise_op.register_autograd(_backward, setup_context=_setup)


class Transformed(torch.autograd.Function):
    """The operator under transforms of `torch.func`, which do not take the gradient of an operator's own."""

    @staticmethod
    def forward(
        kernel: Kernel | CutFunction, numbers: Sequence[Any], scalars: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(pointwise_op(list(tensors), list(numbers), list(scalars), kernel.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kernel, numbers, scalars, *tensors = inputs
        wanted = ctx.needs_input_grad[3:]
        if not any(wanted):  # derivatives are taken forward, of which nothing is told beforehand
            wanted = [t.is_floating_point() for t in tensors]
        variant = kernel.variant(tensors, like(numbers), wanted, target_of(tensors[0].device), scalars)
        ctx.kernel, ctx.numbers, ctx.scalars = kernel, numbers, scalars
        ctx.differentiable = variant.traced.differentiable
        ctx.results = [(r.shape, r.dtype) for r in output]
        ctx.mark_non_differentiable(*(t for t, flows in zip(output, ctx.differentiable, strict=True) if not flows))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        there = [flows and g is not None for g, flows in zip(grads, ctx.differentiable, strict=True)]
        given = [g for g, flows in zip(grads, there, strict=True) if flows]
        if not given or not any(wanted):
            return (None,) * (3 + len(tensors))
        gradient = ctx.kernel.gradient(wanted, there)
        scalars = (*ctx.scalars, *(False for _ in given))
        found = iter(Transformed.apply(gradient, ctx.numbers, scalars, *tensors, *given))
        return (
            None,
            None,
            None,
            *(_like(next(found), t) if want else None for t, want in zip(tensors, wanted, strict=True)),
        )

    @staticmethod
    def jvp(ctx: Any, _kernel: None, _numbers: None, _scalars: None, *tangents: Tensor | None) -> Any:
        def apply(kernel: Any, tensors: Sequence[Tensor], scalars: Sequence[bool]) -> Sequence[Tensor]:
            found: tuple[Tensor, ...] = Transformed.apply(kernel, ctx.numbers, tuple(scalars), *tensors)
            return found

        tensors, flows = ctx.saved_tensors, ctx.differentiable
        return tuple(tangents_of(ctx.kernel, tensors, ctx.numbers, ctx.scalars, tangents, ctx.results, flows, apply))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], kernel: Kernel | CutFunction, numbers: Any, scalars: Any, *tensors: Tensor
    ) -> tuple[Any, Any]:
        if isinstance(kernel, CutFunction):
            batch = _all_batched(info.batch_size, tensors, in_dims[3:])
            results = Transformed.apply(kernel.batched(), numbers, scalars, *batch)
        else:
            results = Transformed.apply(kernel, numbers, scalars, *_batch_first(tensors, in_dims[3:]))
        return results, (0,) * len(results)


def _transformed(tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Sequence[bool], key: str) -> list[Tensor]:
    results: tuple[Tensor, ...] = Transformed.apply(kernel_of(key), tuple(numbers), tuple(scalars), *tensors)
    return list(results)


before_transforms("pointwise", _transformed)


# -- vmap of what writes -----------------------------------------------------------------------------------


@pointwise_in_place_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    read, written, numbers, kernel = args
    of_read = in_dims[0] or [None] * len(read)
    of_written = in_dims[1] or [None] * len(written)
    if any(dim is None for dim in of_written):
        raise ArgumentError(
            f"{kernel_of(kernel).name} writes to a tensor that vmap does not go over, once for each element that it "
            "goes over. Give that tensor a dimension for them."
        )
    first = _batch_first([*read, *written], [*of_read, *of_written])
    results = pointwise_in_place_op(first[: len(read)], first[len(read) :], numbers, kernel)
    return results, [0] * len(results)


def _all_batched(size: int, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Views `[batch, ...]` of all."""
    pairs = zip(tensors, dims, strict=True)
    return [t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in pairs]


def _batch_first(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Views that broadcast to `[batch, *shape]`."""
    ranks = [t.dim() - (dim is not None) for t, dim in zip(tensors, dims, strict=True)]
    most = max(ranks)
    moved = []
    for tensor, dim, rank in zip(tensors, dims, ranks, strict=True):
        if dim is None:
            moved.append(tensor)
            continue
        first = tensor.movedim(dim, 0)
        moved.append(first.reshape(first.shape[0], *(1,) * (most - rank), *first.shape[1:]) if most > rank else first)
    return moved


# -- launches in a compiler's graph --------------------------------------------------------------------------


def _is_direct(device: torch.device) -> bool:
    """Whether a launch itself can stand in a graph: Triton's cannot be saved, and its interpreter is no compiler."""
    if device.type == "cpu":
        return not interpreted()
    return device.type == "cuda" and not is_exporting()


def _lowered(kernel: Kernel, tensors: Sequence[Tensor], numbers: Sequence[Any], scalars: Any) -> list[Tensor]:
    target = target_on(tensors[0].device, kernel.name)
    constants = _plain(numbers)
    variant = kernel.variant(tensors, constants, [False] * len(tensors), target, scalars)
    results, todo = kernel.prepare(tensors, constants, variant)
    _record(todo, fast_math=kernel.numerics.fast_math)
    return results


def _record(todo: Launch, *, fast_math: bool) -> None:
    kernel = todo.built.compiled()
    if isinstance(kernel, CppKernel):
        text = kernel.text(tuple(t.dtype for t in todo.tensors), CPP_BLOCK, fast_math=fast_math)
        first = kernel.first_written
        launch_cpp(list(todo.tensors[:first]), list(todo.tensors[first:]), list(todo.numbers), text)
        return
    from flexsn_codegen.targets.triton._standalone import standalone  # imports triton, which need not be there

    grid = ((todo.numel + BLOCK - 1) // BLOCK,)
    wrap_triton(standalone(kernel))[grid](*todo.tensors, *todo.numbers, BLOCK=BLOCK)


@pointwise_op.register_torch_dispatch(FunctionalTensorMode)
def _(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors, numbers, scalars, key = args
    kernel = kernel_of(key)
    if has_symbols(numbers) and not is_exporting():
        with mode:
            return by_values(kernel, tensors, numbers, scalars, target_of(tensors[0].device))
    if isinstance(kernel, CutFunction) or not _is_direct(tensors[0].device):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        return _lowered(kernel, tensors, numbers, scalars)


@pointwise_in_place_op.register_torch_dispatch(FunctionalTensorMode)
def _(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    read, written, numbers, key = args
    kernel = kernel_of(key)
    tensors = kernel.merged(read, written)
    check_writes_in_graph(kernel, tensors)
    if has_symbols(numbers) or not _is_direct(tensors[0].device):
        # Also for constants: compilers make nothing of operators that both write and return lists.
        with mode:
            return by_values(kernel, tensors, numbers, None, target_of(tensors[0].device))
    with mode:
        return _lowered(kernel, tensors, numbers, None)
