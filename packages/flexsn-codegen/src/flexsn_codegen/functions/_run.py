"""A call of a pointwise function in eager mode."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexsn_codegen._torch_private_modes import is_forward_mode
from flexsn_codegen.errors import OF_A_CALL
from flexsn_codegen.functions._autograd import Differentiated
from flexsn_codegen.functions._calls import Parts, Structure
from flexsn_codegen.functions._checks import (
    check_gradients,
    check_into,
    check_tensors,
    check_writes,
    has_tangents,
    make_forward_mode_error,
    make_no_tensors_error,
    mark_written,
    needs_gradients,
)
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._kernels import Kernels
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.functions._prepared import PreparedCalls
from flexsn_graph import NothingCutError


def run(
    kernels: Kernels,
    structure: Structure,
    parts: Parts,
    outs: list[Tensor] | None,
    prepared: PreparedCalls | None = None,
) -> Any:
    """Calls a function through a kernel on whole tensors. If this is impossible, uses a kernel that cuts tensors.

    Args:
        outs: the tensors that receive the results. `None` if the results are new memory.
        prepared: records the call so that it can be repeated later. `None` to record nothing.
    """
    tensors, numbers = parts.tensors, parts.numbers
    cut = kernels.find_cut(structure, tensors) if outs is None else None
    if cut is not None:
        # If the numbers differ from those of the earlier call, the function may not cut anything.
        with contextlib.suppress(NothingCutError):
            return _run(kernels, structure, parts, *cut, None, prepared)
    try:
        result = kernels.find(structure, tensors, numbers)
        return _run(kernels, structure, parts, *result, outs, prepared)
    except OF_A_CALL:
        raise
    except Exception as error:
        if not tensors or outs is not None:
            raise
        cut = kernels.cut_after(error, structure, tensors, numbers)
    return _run(kernels, structure, parts, *cut, None, prepared)


def _run(
    kernels: Kernels,
    structure: Structure,
    parts: Parts,
    kernel: Kernel,
    captured: Sequence[Tensor],
    outs: list[Tensor] | None,
    prepared: PreparedCalls | None,
) -> Any:
    tensors, numbers = parts.tensors, parts.numbers
    if captured or not tensors:
        tensors = [*tensors, *captured]
        if not tensors:
            raise make_no_tensors_error(kernels.name)
        check_tensors(kernels.name, tensors)
    if kernel.written:
        check_writes(kernel, tensors)
    writes = bool(kernel.written) or outs is not None
    has_gradients = needs_gradients([*tensors, *(outs or ())])
    if has_gradients:
        check_gradients(kernels.name, writes=writes, autograd=kernels.autograd)
    elif has_tangents(tensors):
        has_gradients = True
        if writes:
            raise make_forward_mode_error(kernels.name)
    if has_gradients:
        scalars = tuple([t.dim() == 0 for t in tensors])
        results = Differentiated.apply(kernel, tuple(numbers), scalars, *tensors)
        if prepared is not None and not is_forward_mode():
            target, flags = target_on(tensors[0].device, kernels.name), [t.requires_grad for t in tensors]
            trace = kernel.variant(tensors, numbers, flags, target, scalars)
            prepared.add(structure, parts.tensors, captured, kernel, trace, outs, scalars)
    else:
        requested = [False] * len(tensors)
        if outs is not None:
            trace = kernel.variant(tensors, numbers, requested, target_on(tensors[0].device, kernels.name))
            check_into(kernel, tensors, trace.dtypes, outs)
        results, trace = kernel.run(tensors, numbers, requested, outs or ())
        if prepared is not None:
            prepared.add(structure, parts.tensors, captured, kernel, trace, outs)
    if writes:
        mark_written([*[tensors[i] for i in kernel.written], *(outs or ())])
    return kernel.returned(results, tensors)
