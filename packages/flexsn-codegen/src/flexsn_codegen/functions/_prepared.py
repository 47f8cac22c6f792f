"""Repeats earlier calls on the fastest path, without another analysis.

Before a prepared call is repeated, it is compared with the new call. The comparison includes the structure and its
constants, each tensor's dtype, shape, strides and device, whether autograd follows the tensor, the captured values, and
the decisions that depend on numbers. If the call writes to existing memory, the comparison also includes the tensors
that share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import is_forward_mode
from flexsn_codegen.functions._autograd import Repeated, TrainedCall
from flexsn_codegen.functions._calls import Parts, Structure, results_together
from flexsn_codegen.functions._checks import mark_written
from flexsn_codegen.functions._kernel import Kernel
from flexsn_codegen.functions._launch import interpreted
from flexsn_codegen.functions._plan import MAX_PLANS, Plan, Trace

# A function of results and arguments.
Launches = Callable[[Sequence[Tensor], Sequence[Tensor]], None]

# Returned instead of a result if no prepared call was launched.
NOT_PREPARED = object()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that can be repeated.

    Attributes:
        captured: result of `_describe_tensors` for the captured tensors.
        sharing: result of `_find_sharing`. Empty if the call only writes to new memory.
        single: the kernel's `single` at this call.
        interpreted: True if the call was prepared for Triton's interpreter.
        trained: the data for a call that autograd follows, otherwise `None`.
    """

    kernel: Kernel
    captured: list[Any]
    trace: Trace
    plan: Plan
    sharing: list[tuple[int, int]]
    single: bool
    interpreted: bool
    trained: TrainedCall | None


class PreparedCalls:
    """The prepared calls of one function."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], _Call] = {}

    def call(self, structure: Structure, parts: Parts, outs: list[Tensor] | None = None) -> Any:
        """Launches a prepared call and returns the function's result, or `NOT_PREPARED` if nothing was launched.

        Args:
            outs: the tensors that receive the results. `None` if the results are new memory.
        """
        tensors = parts.tensors
        result = self._calls.get(_make_key(structure, tensors, outs, torch.is_grad_enabled())) if self._calls else None
        if result is None or is_forward_mode() or result.interpreted != interpreted():
            return NOT_PREPARED
        kernel, trace = result.kernel, result.trace
        captured = kernel.captured.reads.fetch()
        if captured is None:
            return NOT_PREPARED
        if captured:
            if _describe_tensors(captured, torch.is_grad_enabled()) != result.captured:
                return NOT_PREPARED
            tensors = [*tensors, *captured]
        out_tensors = outs or []
        if not trace.fits(parts.numbers):
            return NOT_PREPARED
        if result.trained is not None:
            call_results: list[Tensor] = list(Repeated.apply(result.trained, tuple(parts.numbers), *tensors))
            if kernel.cuts:
                return call_results[0] if result.single else tuple(call_results)
            return results_together(kernel.result, call_results, tensors)
        if (kernel.written or out_tensors) and _find_sharing([*tensors, *out_tensors]) != result.sharing:
            return NOT_PREPARED
        results = result.plan.run(tensors, trace.words(parts.numbers), out_tensors)
        if out_tensors:
            mark_written(out_tensors)
        elif kernel.written:
            mark_written([tensors[i] for i in kernel.written])
        elif kernel.cuts:
            return results[0] if result.single else tuple(results)
        return results_together(kernel.result, results, tensors)

    def repeated(self, structure: Structure, tensors: list[Tensor], outs: list[Tensor]) -> Launches | None:
        """A function that repeats a prepared call.

        `None` if no call is prepared, or if the prepared call is followed by autograd or also depends on values other
        than its tensors.
        """
        entry = self._calls.get(_make_key(structure, tensors, outs, torch.is_grad_enabled()))
        if entry is None or entry.trained is not None or entry.captured or any(entry.trace.words([])):
            return None
        plan, words = entry.plan, entry.trace.words([])

        def repeat(outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
            plan.run(tensors, words, outs)
            mark_written(outs)

        return repeat

    def add(
        self,
        structure: Structure,
        tensors: Sequence[Tensor],
        captured: Sequence[Tensor],
        kernel: Kernel,
        trace: Trace,
        outs: list[Tensor] | None,
        scalars: Sequence[bool] = (),
    ) -> None:
        """Prepares a call for repetition, unless a tensor has its negative bit set.

        Args:
            scalars: for a call that autograd follows, see `Kernel.variant`. Empty for other calls.
        """
        all_tensors = [*tensors, *captured]
        has_grad_mode = torch.is_grad_enabled()
        if any(t.is_neg() for t in all_tensors):
            return
        if len(self._calls) >= MAX_PLANS:
            self._calls.clear()
        out_tensors = outs or []
        sharing = _find_sharing([*all_tensors, *out_tensors]) if out_tensors or kernel.written else []
        plan = trace.plan(all_tensors, out_tensors)
        trained = None
        if scalars:
            requested = tuple(t.requires_grad for t in all_tensors)
            trained = TrainedCall(kernel, trace, plan, tuple(scalars), requested, trace.graph.differentiable)
        self._calls[_make_key(structure, tensors, outs, has_grad_mode)] = _Call(
            kernel,
            _describe_tensors(captured, has_grad_mode),
            trace,
            plan,
            sharing,
            trace.graph.single,
            interpreted(),
            trained,
        )


def _make_key(
    structure: Structure, tensors: Sequence[Tensor], outs: list[Tensor] | None, has_grad_mode: bool
) -> tuple[Any, ...]:
    if outs is None:
        return structure, *_describe_tensors(tensors, has_grad_mode)
    return structure, len(outs), *_describe_tensors([*tensors, *outs], has_grad_mode)


def _find_sharing(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor, the index of the first tensor in the same memory, and the tensor's offset in this memory."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [(memory.index(place), int(t.storage_offset())) for place, t in zip(memory, tensors, strict=True)]


def _describe_tensors(tensors: Sequence[Tensor], has_grad_mode: bool) -> list[Any]:
    """The properties of tensors on which a call depends, except for addresses. `has_grad_mode` is True in grad mode."""
    # A sparse tensor has no strides.
    return [
        (t.dtype, t.shape, t.stride(), t.device, t.is_neg(), has_grad_mode and t.requires_grad)
        if t.layout is torch.strided
        else t.layout
        for t in tensors
    ]
