"""Traces a step whose tensors have different shapes, and finds the pieces into which the step splits the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flexsn_graph._torch_private import undisturbed
from flexsn_graph.cells import StepPieces, pieces_of
from flexsn_graph.errors import NonPointwiseError
from flexsn_graph.lowering._strides import broadcast_shapes
from flexsn_graph.traces._elements import CUT_IN_STEPS
from flexsn_graph.traces._step import CoreTrace, StepValue
from flexsn_graph.tracing._core import unwrap_compiled
from flexsn_graph.tracing._prologue import Hoists


class CutTrace(CoreTrace):
    """The trace of a step that reduces, multiplies, cuts or joins small dimensions of its values. See `cut_step`.

    Kernels are made for the function `in_pieces`, which `trace_step(on_pieces=True)` traces.

    Attributes:
        pieces: pieces of the arguments and results.
    """

    pieces: StepPieces

    def _find_shape(self, results: Sequence[StepValue]) -> tuple[int, ...]:
        return results[0].shape

    def _trace(self) -> None:
        shape = self.step_shape
        results = (*self.outputs, *self.states)
        arguments = broadcast_shapes([value.shape for value in (*self.inputs, *results)])
        if arguments == shape and all(value.shape == shape for value in results):
            # If such a step were split into pieces, it would compile only as long as its dimensions are small.
            raise NonPointwiseError("all values of the step have one shape, so there are no pieces.", "", None)
        tracer = self._get_tracer()
        lowered = tracer.lowered(tracer.record_forward(), CUT_IN_STEPS)
        self.pieces = pieces_of(lowered, self.num_inputs, self.num_states, self.num_outputs)
        self.lifted_values = self.captured_values

    @property
    def in_pieces(self) -> Callable[..., Any]:
        """`core` on pieces. Each piece is a separate argument or result with the step's shape."""
        return partial(self.pieces.core, self.core)

    def fits(self, captured: Sequence[Tensor]) -> bool:
        """Returns True, because the step on pieces lifts its captured tensors itself."""
        return True

    def lift(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the captured tensors, because the step on pieces lifts its captured tensors itself."""
        return tuple(captured)

    def of_twin(self, core: Callable[..., Any]) -> None:
        """Returns `None`, because each core is analysed separately. The steps on pieces share their traces."""


def cut_step(
    core: Callable[..., Any],
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    example_inputs: Sequence[Tensor],
    *,
    follow: bool = True,
    hoist: bool = True,
) -> CutTrace:
    """Finds the pieces of a step. For the arguments, see `trace_core`.

    Raises:
        The errors of `trace_step`.
    """
    core = unwrap_compiled(core)
    with undisturbed():
        hoists = Hoists.EVERYTHING if hoist else Hoists.NOTHING
        return CutTrace(core, num_inputs, num_states, num_outputs, example_inputs, follow, hoists)
