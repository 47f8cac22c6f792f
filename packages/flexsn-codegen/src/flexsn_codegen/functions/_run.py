"""A call of a pointwise function, by one kernel on whole tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexsn_codegen.functions._autograd import WithGradients
from flexsn_codegen.functions._calls import Parts, Structure, results_together
from flexsn_codegen.functions._checks import (
    check_gradients,
    check_into,
    check_tensors,
    check_writes,
    has_tangents,
    tell_written,
    wants_gradients,
    without_tensors,
    written_forward,
)
from flexsn_codegen.functions._kernels import Kernels
from flexsn_codegen.functions._launch import target_on
from flexsn_codegen.functions._prepared import PreparedCalls


def run(
    kernels: Kernels,
    structure: Structure,
    parts: Parts,
    outs: list[Tensor] | None,
    prepared: PreparedCalls | None = None,
) -> Any:
    """Calls a function.

    Args:
        outs: what the results are written to; `None`: new memory.
        prepared: gets the call, to make it again.
    """
    kernel, captured = kernels.find(structure, parts.tensors, parts.numbers)
    tensors, numbers = parts.tensors, parts.numbers
    if captured or not tensors:
        tensors = [*tensors, *captured]
        if not tensors:
            raise without_tensors(kernels.name)
        check_tensors(kernels.name, tensors)
    if kernel.written:
        check_writes(kernel, tensors)
    wants = wants_gradients([*tensors, *(outs or ())])
    if wants:
        check_gradients(kernels.name, writes=bool(kernel.written) or outs is not None, autograd=kernels.autograd)
    elif has_tangents(tensors):
        wants = True
        if kernel.written or outs is not None:
            raise written_forward(kernels.name)
    if wants:
        results = WithGradients.apply(kernel, numbers, *tensors)
    else:
        target = target_on(tensors[0].device, kernels.name)
        if outs is not None:
            dtypes = kernel.variant(tensors, numbers, [False] * len(tensors), target).traced.dtypes
            check_into(kernel, tensors, dtypes, outs)
        results = kernel.run(tensors, numbers, [False] * len(tensors), outs or ())[0]
        if prepared is not None:
            prepared.add(structure, parts.tensors, captured, numbers, kernel, kernel.captured.reads, target, outs)
    if kernel.written or outs:
        tell_written([*[tensors[i] for i in kernel.written], *(outs or ())])
    return results_together(kernel.result, results, tensors)
