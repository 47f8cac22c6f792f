"""Calls like an earlier one, by the shortest road: without gradients, or anything else to be found out again.

What a call was prepared for is compared with the next one: the structure and the constants in it, each tensor's dtype,
shape, strides and device, what the function reads besides its arguments, and what its numbers decide; of results that
are written to memory that is there, also what they have in common with the other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexsn_codegen._torch_private_modes import is_forward_mode
from flexsn_codegen.functions._calls import Parts, Structure, results_together
from flexsn_codegen.functions._checks import tell_written, wants_gradients
from flexsn_codegen.functions._kernel import Kernel, Planned, Variant
from flexsn_codegen.functions._launch import RepeatedLaunch, interpreted
from flexsn_codegen.targets import Target
from flexsn_graph.reads import Reads

# Of results, and arguments.
Launches = Callable[[Sequence[Tensor], Sequence[Tensor]], None]

_MAX_CALLS = 1024
# Instead of a result.
NOT_PREPARED = object()


@dataclass(slots=True)
class _Call:
    """A call that can be made again.

    Attributes:
        captured: the kinds of the captured tensors.
        outputs: shape, strides, dtype and device of each result; empty where they are written to what is there.
        sharing: which of the tensors share memory, if results are written to what is there.
        launch: of its kernel.
        interpreted: whether it was prepared for Triton's interpreter.
    """

    kernel: Kernel
    reads: Reads
    captured: list[Any]
    variant: Variant
    planned: Planned
    launch: RepeatedLaunch
    outputs: list[tuple[Any, ...]]
    sharing: list[tuple[int, int]]
    interpreted: bool


class PreparedCalls:
    """The calls of one function that are known."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Call] = {}

    def call(self, structure: Structure, parts: Parts, outs: list[Tensor] | None = None) -> Any:
        """What the function returns, or `NOT_PREPARED`: nothing was launched.

        Args:
            outs: what the results are written to; `None`: new memory.
        """
        tensors = parts.tensors
        found = self._known.get(_key(structure, tensors, outs)) if self._known else None
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
        if wants_gradients([*tensors, *(outs or ())]) or not found.variant.fits(numbers):
            return NOT_PREPARED
        if outs is None:
            results = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device)
                for shape, strides, dtype, device in found.outputs
            ]
        elif _sharing([*tensors, *outs]) == found.sharing:
            results = outs
        else:
            return NOT_PREPARED
        planned, every = found.planned, [*tensors, *results]
        found.launch([every[i] for i in planned.operands], [*planned.integers, *found.variant.integers(numbers)])
        if outs is not None:
            tell_written(outs)
        return results_together(found.kernel.result, results, ())

    def repeated(self, structure: Structure, tensors: list[Tensor], outs: list[Tensor]) -> Launches | None:
        """What launches a call that has been made; `None`: it is not known, or has more to look at than tensors."""
        found = self._known.get(_key(structure, tensors, outs))
        if found is None or found.captured or found.variant.integers([]):
            return None
        launch, operands, numbers = found.launch, found.planned.operands, list(found.planned.integers)

        def again(outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
            every = [*tensors, *outs]
            launch([every[i] for i in operands], numbers)
            tell_written(outs)

        return again

    def add(
        self,
        structure: Structure,
        tensors: Sequence[Tensor],
        captured: Sequence[Tensor],
        numbers: Sequence[Any],
        kernel: Kernel,
        reads: Reads,
        target: Target,
        outs: list[Tensor] | None,
    ) -> None:
        """Prepares a call that has been made, if there are more to come that could be made so."""
        every = [*tensors, *captured]
        if kernel.written or any(t.is_neg() for t in every):
            return
        variant = kernel.variant(every, numbers, [False] * len(every), target)
        planned = kernel.planned(every, variant, outs or ())
        plan, device = planned.plan, every[0].device
        if plan.numel == 0:
            return
        new = planned.dtypes if outs is None else []
        outputs = [(plan.shape, plan.strides, dtype, device) for dtype in new]
        like = [*every, *(outs or [torch.empty(0, dtype=dtype, device=device) for dtype in planned.dtypes])]
        again = RepeatedLaunch(
            target,
            planned.built.compiled(),
            [like[i] for i in planned.operands],
            plan.numel,
            fast_math=kernel.numerics.fast_math,
        )
        if len(self._known) >= _MAX_CALLS:
            self._known.clear()
        sharing = [] if outs is None else _sharing([*every, *outs])
        self._known[_key(structure, tensors, outs)] = _Call(
            kernel, reads, _kinds(captured), variant, planned, again, outputs, sharing, interpreted()
        )


def _key(structure: Structure, tensors: Sequence[Tensor], outs: list[Tensor] | None) -> tuple[Any, ...]:
    if outs is None:
        return structure, *_kinds(tensors)
    return structure, len(outs), *_kinds([*tensors, *outs])


def _sharing(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor, the first one that lies in the same memory, and how far from its beginning it does."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [(memory.index(place), int(t.storage_offset())) for place, t in zip(memory, tensors, strict=True)]


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """All of the tensors that a launch is made for, but addresses."""
    # A sparse tensor has no strides.
    return [
        (t.dtype, t.shape, t.stride(), t.device, t.is_neg()) if t.layout is torch.strided else t.layout for t in tensors
    ]
