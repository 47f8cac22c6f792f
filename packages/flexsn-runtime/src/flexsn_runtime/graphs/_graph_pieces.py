"""Rewrites a step of a compiler's graph so that the arguments and results of the step are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from flexsn_graph import Pieces, StepValue, cut_step, run_graph
from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_runtime._torch_private import untraced
from flexsn_runtime.graphs._graph_step import GraphStep, StepFunction
from flexsn_runtime.graphs._symbols import Assignment, Size

_T = TypeVar("_T")
# The pieces of an argument or result; `None` for a size, and for a tensor that is not cut.
_Cut = Pieces | None


@dataclass(frozen=True, slots=True)
class GraphPieces:
    """The pieces of a step's arguments and results.

    Attributes:
        arguments: pieces of `[*inputs, *states, *lifted]`; `None` for an argument that is not cut.
        num_inputs, num_states: numbers of inputs and of states in `arguments`.
        outputs: pieces of the outputs.
    """

    arguments: tuple[_Cut, ...]
    num_inputs: int
    num_states: int
    outputs: tuple[_Cut, ...]

    @classmethod
    def of(cls, step: GraphStep, device: torch.device) -> GraphPieces:
        """Finds the pieces of a step.

        Raises:
            NonPointwiseError: the step cannot be cut into pieces.
        """
        assignment = Assignment(step.sizes, 0)

        def stand_in(value: StepValue | Size) -> Any:
            if not isinstance(value, StepValue):
                return assignment(value)
            tensor = torch.empty((), dtype=value.dtype, device=device).expand(assignment.shape(value.shape))
            return tensor.requires_grad_(tensor.is_floating_point())

        with untraced():
            primals = [stand_in(value) for value in step.arguments[: step.num_primals]]
            lifted = [stand_in(value) for value in step.arguments[step.num_primals :]]

            def core(*values: Tensor) -> tuple[Tensor, ...]:
                return tuple(run_graph(step.core, *values, *lifted))

            counts = (step.num_inputs, step.num_states, step.num_outputs)
            trace = cut_step(core, *counts, primals, follow=False, hoist=False)
        pieces = trace.pieces
        captured = {id(t): entry for t, entry in zip(trace.captured, pieces.lifted, strict=True)}
        lifted_pieces = [captured.get(id(value)) for value in lifted]
        cut_lifted = [entry if entry is not None and entry.count > 1 else None for entry in lifted_pieces]
        return cls((*pieces.inputs, *pieces.states, *cut_lifted), step.num_inputs, step.num_states, pieces.outputs)

    @property
    def _results(self) -> tuple[_Cut, ...]:
        return *self.outputs, *self._states

    @property
    def _states(self) -> tuple[_Cut, ...]:
        return self.arguments[self.num_inputs : self.num_inputs + self.num_states]

    def step(self, graph_step: GraphStep) -> GraphStep:
        """Returns the step with pieces as its arguments and results."""
        arguments: list[StepValue | Size] = []
        for entry, value in zip(self.arguments, graph_step.arguments, strict=True):
            if entry is None or not isinstance(value, StepValue):
                arguments.append(value)
            else:
                arguments += [StepValue(entry.shape(value.shape), value.dtype)] * entry.count
        core = _OnPieces(graph_step.core, self.arguments, self._results)
        vjp = None
        if graph_step.vjp is not None:
            cotangents = _select(self._results, graph_step.cotangents)
            vjp = _OnPieces(
                graph_step.vjp, (*self.arguments, *cotangents), _select(self.arguments, graph_step.needs_grad)
            )
        return GraphStep(
            core,
            _count_all(self.arguments[: self.num_inputs]),
            _count_all(self._states),
            _count_all(self.outputs),
            arguments,
            vjp,
            _repeat_for_pieces(self._results, graph_step.cotangents) if graph_step.cotangents else (),
            _repeat_for_pieces(self.arguments, graph_step.needs_grad) if graph_step.needs_grad else (),
            on_pieces=True,
        )

    def scan(self, layout: ScanLayout) -> ScanLayout:
        """Returns the layout of the scan whose arguments and results are pieces."""
        return replace(
            layout,
            num_inputs=_count_all(self.arguments[: self.num_inputs]),
            num_states=_count_all(self._states),
            num_outputs=_count_all(self.outputs),
            zero_states=_repeat_for_pieces(self._states, layout.zero_states) if layout.zero_states else (),
        )

    def backward(self, layout: BackwardLayout) -> BackwardLayout:
        """Returns the layout of the gradient of the scan whose arguments and results are pieces."""
        return replace(
            layout,
            scan=self.scan(layout.scan),
            needs=_repeat_for_pieces(self.arguments, layout.needs),
            active_states=_repeat_for_pieces(self._states, layout.active_states),
            output_grads=_repeat_for_pieces(self.outputs, layout.output_grads),
            state_grads=_repeat_for_pieces(self._states, layout.state_grads),
        )

    def split(self, flat_args: Sequence[Any], layout: ScanLayout) -> list[Any]:
        """Returns the pieces of a scan's arguments."""
        leads = [int(i < layout.num_inputs) for i in range(len(flat_args))]
        return _split(self.arguments, flat_args, leads)

    def split_states(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Returns the pieces of saved states, which have the shape `[rows, *step]`."""
        return _split(self._states, saved, [1] * len(saved))

    def split_gradients(self, layout: BackwardLayout, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the pieces of `gradients`, which contains only the gradients that the layout marks as present."""
        outputs, states = _select(self.outputs, layout.output_grads), _select(self._states, layout.state_grads)
        leads = [1] * len(outputs) + [int(not layout.scan.final_state)] * len(states)
        return _split((*outputs, *states), gradients, leads)

    def join_results(self, layout: ScanLayout, results: Sequence[Tensor]) -> list[Tensor]:
        """Joins the pieces of a scan's results."""
        leads = [1] * len(self.outputs) + [int(not layout.final_state)] * len(self._states)
        results_and_checkpoints = self._results
        if layout.checkpoint_interval:
            results_and_checkpoints += self._states
            leads += [1] * len(self._states)
        return _join(results_and_checkpoints, results, leads)

    def join_gradients(self, layout: BackwardLayout, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Joins the pieces of the gradients of a scan's arguments."""
        leads = [int(i < layout.scan.num_inputs) for i in range(len(self.arguments))]
        return _join(_select(self.arguments, layout.needs), gradients, _select(leads, layout.needs))


class _OnPieces:
    """A function of pieces, which joins its arguments, runs a graph, and cuts the results."""

    def __init__(self, graph: StepFunction, arguments: Sequence[_Cut], results: Sequence[_Cut]) -> None:
        self._run, self._arguments, self._results = graph, tuple(arguments), tuple(results)

    @property
    def code(self) -> Any:
        """A value that is equal for two functions if their graphs have equal code and their pieces are equal."""
        return self._run.code, self._arguments, self._results

    @property
    def graph(self) -> fx.Graph:
        """The graph, whose operators compute with whole values."""
        return self._run.graph

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        arguments = _join(self._arguments, values, [0] * len(self._arguments))
        return tuple(_split(self._results, tuple(run_graph(self._run, *arguments)), [0] * len(self._results)))


def _count(entry: _Cut) -> int:
    return 1 if entry is None else entry.count


def _count_all(pieces: Sequence[_Cut]) -> int:
    return sum(map(_count, pieces))


def _repeat_for_pieces(pieces: Sequence[_Cut], values: Sequence[_T]) -> tuple[_T, ...]:
    """Returns `values`, one for each tensor, with each value repeated for all pieces of its tensor."""
    return tuple(value for entry, value in zip(pieces, values, strict=True) for _ in range(_count(entry)))


def _select(values: Sequence[_T], flags: Sequence[bool]) -> list[_T]:
    return [value for value, is_chosen in zip(values, flags, strict=True) if is_chosen]


def _split(pieces: Sequence[_Cut], values: Sequence[Any], leads: Sequence[int]) -> list[Any]:
    results: list[Any] = []
    for entry, value, lead in zip(pieces, values, leads, strict=True):
        results += [value] if entry is None else entry.split(value, lead)
    return results


def _join(pieces: Sequence[_Cut], values: Sequence[Any], leads: Sequence[int]) -> list[Any]:
    results, first = [], 0
    for entry, lead in zip(pieces, leads, strict=True):
        results.append(values[first] if entry is None else entry.join(values[first : first + entry.count], lead))
        first += _count(entry)
    return results
