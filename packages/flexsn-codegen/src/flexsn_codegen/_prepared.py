"""Calls like an earlier one, by the shortest road: without gradients, writes, or anything else to be found out again.

What a call was prepared for is compared with the next one: the structure and the constants in it, each tensor's dtype,
shape, strides and device, what the function reads besides its arguments, and what its numbers decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._calls import Parts, Structure, results_together
from flexsn_codegen._checks import wants_gradients
from flexsn_codegen._kernel import Kernel, Planned, Variant
from flexsn_codegen._launch import CPP_BLOCK, interpreted, launch
from flexsn_codegen._torch_private_modes import is_forward_mode
from flexsn_codegen.targets import Target
from flexsn_codegen.targets.cpp import CppKernel
from flexsn_graph.reads import Reads

_MAX_CALLS = 1024
# Instead of a result.
NOT_PREPARED = object()


@dataclass(slots=True)
class _Call:
    """A call that can be made again.

    Attributes:
        captured: the kinds of the captured tensors.
        outputs: shape, strides, dtype and device of each result.
        direct: the compiled function, where it is launched by a list of numbers; else `None`.
        interpreted: whether it was prepared for Triton's interpreter.
    """

    kernel: Kernel
    reads: Reads
    captured: list[Any]
    variant: Variant
    planned: Planned
    target: Target
    outputs: list[tuple[Any, ...]]
    direct: Any
    interpreted: bool


class PreparedCalls:
    """The calls of one function that are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Call] = {}

    def call(self, structure: Structure, parts: Parts) -> Any:
        """What the function returns, or `NOT_PREPARED`: nothing was launched."""
        tensors = parts.tensors
        found = self._known.get((structure, *_kinds(tensors))) if self._known else None
        if found is None or is_forward_mode() or found.interpreted != interpreted():
            return NOT_PREPARED
        captured = found.reads.fetch()
        if captured is None:
            return NOT_PREPARED
        if captured:
            if _kinds(captured) != found.captured:
                return NOT_PREPARED
            tensors = [*tensors, *captured]
        numbers = parts.numbers
        if wants_gradients(tensors) or not found.variant.fits(numbers):
            return NOT_PREPARED
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in found.outputs
        ]
        planned = found.planned
        every = [*tensors, *results]
        operands = [every[i] for i in planned.operands]
        integers = [*planned.integers, *found.variant.integers(numbers)]
        if found.direct is not None:
            found.direct([*[t.data_ptr() for t in operands], *integers, torch.get_num_threads()])
        else:
            kernel, fast_math = planned.built.compiled(), found.kernel.numerics.fast_math
            launch(found.target, kernel, operands, integers, planned.plan.numel, fast_math=fast_math)
        return results_together(found.kernel.result, results, ())

    def add(
        self,
        structure: Structure,
        tensors: Sequence[Tensor],
        captured: Sequence[Tensor],
        numbers: Sequence[Any],
        kernel: Kernel,
        reads: Reads,
        target: Target,
    ) -> None:
        """Prepares a call that has been made, if there are more to come that could be made so."""
        every = [*tensors, *captured]
        if kernel.written or any(t.is_neg() for t in every):
            return
        variant = kernel.variant(every, numbers, [False] * len(every), target)
        planned = kernel.planned(every, variant)
        plan, device = planned.plan, every[0].device
        if plan.numel == 0:
            return
        outputs = [(plan.shape, plan.strides, dtype, device) for dtype in planned.dtypes]
        compiled = planned.built.compiled()
        direct = None
        if isinstance(compiled, CppKernel):
            dtypes = [*(t.dtype for t in every), *planned.dtypes]
            kinds = tuple(dtypes[i] for i in planned.operands)
            direct = compiled.compiled(kinds, CPP_BLOCK, fast_math=kernel.numerics.fast_math)
        if len(self._known) >= _MAX_CALLS:
            self._known.clear()
        self._known[structure, *_kinds(tensors)] = _Call(
            kernel, reads, _kinds(captured), variant, planned, target, outputs, direct, interpreted()
        )


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """All of the tensors that a launch is made for, but addresses."""
    # A sparse tensor has no strides.
    return [
        (t.dtype, t.shape, t.stride(), t.device, t.is_neg()) if t.layout is torch.strided else t.layout
        for t in tensors
    ]
