"""Calls of pointwise functions that are recorded by compilers, exporters, transforms of `torch.func` or modes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_guards import leave_graph, recompile_unless, records_a_graph, written_before
from flexsn_codegen._torch_private_modes import constant, is_forward_mode
from flexsn_codegen.errors import OF_A_CALL, ArgumentError
from flexsn_codegen.functions._autograd import Differentiated
from flexsn_codegen.functions._calls import Parts, Structure, results_together
from flexsn_codegen.functions._checks import (
    check_gradients,
    make_forward_mode_error,
    make_into_error,
    make_no_tensors_error,
    needs_gradients,
)
from flexsn_codegen.functions._kernel import Kernel, kernel_of
from flexsn_codegen.functions._kernels import Kernels, kernels_of
from flexsn_codegen.functions._launch import target_of
from flexsn_codegen.functions._pointwise_op import pointwise_in_place_op, pointwise_op
from flexsn_codegen.functions._writes import check_outs


def by_operator(kernels: Kernels, structure: Structure, parts: Parts, outs: list[Tensor] | None = None) -> Any:
    """Calls a function through an operator that a compiler or a transform can observe.

    Args:
        outs: the tensors to which the results are copied. `None` if the results are new memory.
    """
    tensors = parts.tensors
    dims = 0
    for tensor in tensors:
        dims = max(dims, tensor.dim())
    kinds = tuple([(t.dtype, t.dim()) for t in tensors])
    device = tensors[0].device.type if tensors else "cpu"
    key, num_captured, written, result, cuts = _prepare(kernels.handle, structure, kinds, dims, device)
    if num_captured:
        tensors = [*tensors, *kernels.captured[key]]
    if not tensors:
        raise make_no_tensors_error(kernels.name)
    if needs_gradients(tensors if outs is None else [*tensors, *outs]):
        check_gradients(kernels.name, writes=bool(written) or outs is not None, autograd=kernels.autograd)
    if outs is not None and written:
        raise make_into_error(kernels.name)
    if not written:
        scalars = [t.dim() == 0 for t in tensors]
        if not torch.compiler.is_dynamo_compiling() and is_forward_mode():
            results = Differentiated.apply(kernel_of(key), tuple(parts.numbers), tuple(scalars), *tensors)
        else:
            results = pointwise_op(tensors, parts.numbers, scalars, key)
        if outs is not None:
            if cuts:
                raise ArgumentError(
                    f"{kernels.name} cuts its arguments into pieces, so its results are new memory. Call it "
                    "without `into`."
                )
            check_outs(kernels.name, outs, [r.dtype for r in results], results[0].shape, results[0].device)
            for out, value in zip(outs, results, strict=True):
                out.copy_(value)
            return results_together(result, outs, ())
        if cuts:
            # The operator has just traced the function with the arguments' own shapes.
            return results[0] if _is_single(key) else tuple(results)
        return results_together(result, results, ())
    if is_forward_mode():
        raise make_forward_mode_error(kernels.name)
    read = [t for i, t in enumerate(tensors) if i not in written]
    changed = [tensors[i] for i in written]
    results = pointwise_in_place_op(read, changed, parts.numbers, key)
    return results_together(result, results, tensors)


@constant
def _prepare(
    handle: str, structure: Structure, kinds: tuple[tuple[torch.dtype, int], ...], dims: int, device: str
) -> tuple[str, int, tuple[int, ...], Structure, bool]:
    """The kernel for a call, as a tuple of properties.

    The properties are the kernel's key, the number of captured tensors, the positions of written tensors, the structure
    of the return value, and True if the kernel cuts dimensions. The function is run with sizes of 1, because sizes in
    the graph may be symbols. A function that cuts dimensions is traced later, by its operator.
    """
    kernels = kernels_of(handle)
    shapes = [(1,) * (dims if dim else 0) for _, dim in kinds]
    dtypes = [dtype for dtype, _ in kinds]
    pairs = zip(shapes, dtypes, strict=True)
    examples = [torch.empty(shape, dtype=dtype, device=available_device(device)) for shape, dtype in pairs]
    cut = kernels.cuts.get((structure, kinds))
    if cut is None or cut.captured.fetch() is None:
        numbers = sample_numbers(structure)
        try:
            kernel, captured = kernels.find(structure, examples, numbers)
            tensors = [*examples, *captured]
            if tensors:  # the trace may also show that the function cuts dimensions
                kernel.variant(tensors, numbers, [False] * len(tensors), target_of(tensors[0].device))
        except OF_A_CALL:
            raise
        except Exception as error:
            if not kinds:
                raise
            cut = kernels.cut_for_graphs(structure, kinds, numbers, error)
        else:
            num_captured = follow_reads(kernels, kernel)
            return kernel.key, num_captured, kernel.written, kernel.result, False
    return cut.key, follow_reads(kernels, cut), (), (), True


def follow_reads(kernels: Kernels, kernel: Kernel) -> int:
    """Guards the recorded graph, if any, against changes of captured values. Returns the number of captured tensors.

    Each call of the graph uses the tensors that are captured at that time. If any other captured value has changed,
    Dynamo records another graph.
    """
    captured, key = kernel.captured, kernel.key
    if key not in kernels.captured:
        weakref.finalize(kernel, kernels.captured.pop, key, None)
    kernels.captured[key] = tuple(captured.tensors)
    if not records_a_graph():
        return len(captured.tensors)

    def holds(kernel: object = kernel) -> bool:  # the graph refers to the kernel and keeps it alive
        result = captured.fetch()
        if result is None:
            return False
        kernels.captured[key] = result
        return True

    names = written_before(captured.reads.places())
    if names:
        leave_graph(
            f"{kernels.name} reads {', '.join(names)}, which compiled code has changed before it calls "
            f"{kernels.name}. The new value is only stored after the graph has run. Pass the value to {kernels.name} "
            "as an argument, or change it outside of the compiled function."
        )
    recompile_unless(holds, f"captured values of {kernels.name} are unchanged since the graph was made")
    return len(captured.tensors)


@constant
def _is_single(key: str) -> bool:
    """True if a function that cuts dimensions returned a tensor, not a tuple, when the function was last traced."""
    return bool(kernel_of(key).single)


def available_device(device: str) -> str:
    """The device type itself if it is "cpu", or "cuda" with an available GPU. Otherwise "meta"."""
    return device if device == "cpu" or (device == "cuda" and torch.cuda.is_available()) else "meta"


def sample_numbers(structure: Structure) -> list[int | float]:
    """Numbers for a first run of the function. The kernel's traces use the numbers of a call instead."""
    kind = structure[0]
    if kind == "float":
        return [0.5]
    if kind == "int":
        return [3]
    if kind == "call":
        return [n for part in structure[1] for n in sample_numbers(part)] + [
            n for _, p in structure[2] for n in sample_numbers(p)
        ]
    if kind in ("tuple", "list"):
        return [n for part in structure[1] for n in sample_numbers(part)]
    if kind == "dict":
        return [n for _, part in structure[1] for n in sample_numbers(part)]
    return []
