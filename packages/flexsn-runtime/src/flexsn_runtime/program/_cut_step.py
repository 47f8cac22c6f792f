"""A step that runs on pieces of its values. A program for the step on pieces provides the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from flexsn_codegen import Numerics
from flexsn_graph import CutTrace, Pieces, StepValue
from flexsn_runtime.backend import TargetName
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.step._specialization import CoreSpecialization

if TYPE_CHECKING:
    from flexsn_runtime.program._program import ScanProgram


class CutSpecialization(CoreSpecialization):
    """A traced step that runs on pieces of its values, because it combines different elements of small dimensions.

    Args:
        program: the program of the step on pieces.
    """

    trace: CutTrace

    def __init__(
        self,
        trace: CutTrace,
        name: str,
        device: torch.device,
        numerics: Numerics,
        target: TargetName,
        program: ScanProgram,
    ) -> None:
        super().__init__(trace, name, device, numerics, target, None)
        self.program = program
        self._target_to_check: TargetName | None = None

    def written_in(self, target: TargetName) -> Self:
        other = copy(self)
        other._target_to_check = target
        return other

    def check(self, *, training: bool) -> None:
        pieces = self.trace.pieces
        inputs = _describe_pieces(pieces.inputs, self.trace.inputs)
        states = _describe_pieces(pieces.states, self.trace.states)
        step, _ = self.program._specialize(self.device, inputs, states)
        (step if self._target_to_check is None else step.written_in(self._target_to_check)).check(training=training)

    def split(self, arguments: Arguments) -> tuple[list[Tensor], list[Tensor]]:
        """Splits inputs and states into pieces. Without initial states, the result has no pieces of states."""
        pieces = self.trace.pieces
        states = [state for state in arguments.states if state is not None]
        inputs = [
            piece
            for value_pieces, x in zip(pieces.inputs, arguments.inputs, strict=True)
            for piece in value_pieces.split(x, 1)
        ]
        if not states:
            return inputs, []
        return inputs, [
            piece for value_pieces, v in zip(pieces.states, states, strict=True) for piece in value_pieces.split(v)
        ]

    def instead(self, arguments: Arguments) -> Mapping[int, Tensor] | None:
        """Returns the lifted tensors that replace captured tensors in a call, by the `id` of the captured tensor.

        The result is `None` if the call replaces no captured tensor.
        """
        captured = self.captured()
        assert captured is not None, "the captured tensors have just been read"
        pairs = zip(captured, arguments.lifted, strict=True)
        return {id(tensor): replacement for tensor, replacement in pairs if tensor is not replacement} or None

    def join(self, results: tuple[Tensor, ...], *, state_seqs: bool) -> tuple[Tensor, ...]:
        """Joins pieces into `(*output_seqs, *states)`."""
        pieces, joined_values, start = self.trace.pieces, list[Tensor](), 0
        leads = [1] * len(pieces.outputs) + [int(state_seqs)] * len(pieces.states)
        for value_pieces, lead in zip((*pieces.outputs, *pieces.states), leads, strict=True):
            joined_values.append(value_pieces.join(results[start : start + value_pieces.count], lead))
            start += value_pieces.count
        return tuple(joined_values)

    def forget_plans(self) -> None:
        self.program.forget_plans()

    def close(self) -> None:
        self.program.close()

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels of the step on pieces."""
        return tuple(name for step in self.program.specializations for name in step.kernel_names)


def _describe_pieces(pieces: tuple[Pieces, ...], values: tuple[StepValue, ...]) -> tuple[StepValue, ...]:
    """Returns descriptions of the pieces of arguments."""
    return tuple(
        StepValue(value_pieces.shape(value.shape), value.dtype)
        for value_pieces, value in zip(pieces, values, strict=True)
        for _ in range(value_pieces.count)
    )
