"""Rewrites a step of a compiler's graph so that it works on pieces of its values."""

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
# Pieces of a tensor; `None` for a size, or for a tensor that is not cut.
_Cut = Pieces | None


@dataclass(frozen=True, slots=True)
class GraphPieces:
    """The pieces of a step's arguments and results.

    Attributes:
        arguments: pieces of `[*inputs, *states, *lifted]`; `None` for an argument that is not cut.
        num_inputs, num_states: numbers of inputs and of states among them.
        outputs: pieces of the outputs.
    """

    arguments: tuple[_Cut, ...]
    num_inputs: int
    num_states: int
    outputs: tuple[_Cut, ...]

    @classmethod
    def of(cls, step: GraphStep, device: torch.device) -> GraphPieces:
        """The pieces of a step.

        Raises:
            NonPointwiseError: the step cannot be cut into pieces.
        """
        assigned = Assignment(step.sizes, 0)

        def stand_in(value: StepValue | Size) -> Any:
            if not isinstance(value, StepValue):
                return assigned(value)
            tensor = torch.empty((), dtype=value.dtype, device=device).expand(assigned.shape(value.shape))
            return tensor.requires_grad_(tensor.is_floating_point())

        with untraced():
            primals = [stand_in(value) for value in step.arguments[: step.num_primals]]
            lifted = [stand_in(value) for value in step.arguments[step.num_primals :]]

            def core(*values: Tensor) -> tuple[Tensor, ...]:
                return tuple(run_graph(step.core, *values, *lifted))

            counts = (step.num_inputs, step.num_states, step.num_outputs)
            trace = cut_step(core, *counts, primals, follow=False, hoist=False)
        pieces = trace.pieces
        captured = {id(t): one for t, one in zip(trace.captured, pieces.lifted, strict=True)}
        others = [captured.get(id(value)) for value in lifted]
        cut = [one if one is not None and one.count > 1 else None for one in others]
        return cls((*pieces.inputs, *pieces.states, *cut), step.num_inputs, step.num_states, pieces.outputs)

    @property
    def _results(self) -> tuple[_Cut, ...]:
        return *self.outputs, *self._states

    @property
    def _states(self) -> tuple[_Cut, ...]:
        return self.arguments[self.num_inputs : self.num_inputs + self.num_states]

    def step(self, whole: GraphStep) -> GraphStep:
        """The step on pieces."""
        arguments: list[StepValue | Size] = []
        for one, value in zip(self.arguments, whole.arguments, strict=True):
            if one is None or not isinstance(value, StepValue):
                arguments.append(value)
            else:
                arguments += [StepValue(one.shape(value.shape), value.dtype)] * one.count
        core = _OnPieces(whole.core, self.arguments, self._results)
        vjp = None
        if whole.vjp is not None:
            given = _chosen(self._results, whole.cotangents)
            vjp = _OnPieces(whole.vjp, (*self.arguments, *given), _chosen(self.arguments, whole.needs_grad))
        return GraphStep(
            core,
            _number(self.arguments[: self.num_inputs]),
            _number(self._states),
            _number(self.outputs),
            arguments,
            vjp,
            _for_each(self._results, whole.cotangents) if whole.cotangents else (),
            _for_each(self.arguments, whole.needs_grad) if whole.needs_grad else (),
            on_pieces=True,
        )

    def scan(self, layout: ScanLayout) -> ScanLayout:
        """The layout of the scan on pieces."""
        return replace(
            layout,
            num_inputs=_number(self.arguments[: self.num_inputs]),
            num_states=_number(self._states),
            num_outputs=_number(self.outputs),
            zero_states=_for_each(self._states, layout.zero_states) if layout.zero_states else (),
        )

    def backward(self, layout: BackwardLayout) -> BackwardLayout:
        """The layout of the gradient of the scan on pieces."""
        return replace(
            layout,
            scan=self.scan(layout.scan),
            needs=_for_each(self.arguments, layout.needs),
            active_states=_for_each(self._states, layout.active_states),
            output_grads=_for_each(self.outputs, layout.output_grads),
            state_grads=_for_each(self._states, layout.state_grads),
        )

    def split(self, flat_args: Sequence[Any], layout: ScanLayout) -> list[Any]:
        """The pieces of a scan's arguments."""
        leads = [int(i < layout.num_inputs) for i in range(len(flat_args))]
        return _split(self.arguments, flat_args, leads)

    def split_states(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of saved states, `[rows, *step]` each."""
        return _split(self._states, saved, [1] * len(saved))

    def split_gradients(self, layout: BackwardLayout, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of the gradients that are present."""
        outputs, states = _chosen(self.outputs, layout.output_grads), _chosen(self._states, layout.state_grads)
        leads = [1] * len(outputs) + [int(not layout.scan.final_state)] * len(states)
        return _split((*outputs, *states), gradients, leads)

    def join_results(self, layout: ScanLayout, results: Sequence[Tensor]) -> list[Tensor]:
        """The results of a scan, joined from their pieces."""
        leads = [1] * len(self.outputs) + [int(not layout.final_state)] * len(self._states)
        results_and_checkpoints = self._results
        if layout.checkpoint_interval:
            results_and_checkpoints += self._states
            leads += [1] * len(self._states)
        return _join(results_and_checkpoints, results, leads)

    def join_gradients(self, layout: BackwardLayout, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of a scan's arguments, joined from their pieces."""
        leads = [int(i < layout.scan.num_inputs) for i in range(len(self.arguments))]
        return _join(_chosen(self.arguments, layout.needs), gradients, _chosen(leads, layout.needs))


class _OnPieces:
    """A graph as a function of pieces."""

    def __init__(self, graph: StepFunction, arguments: Sequence[_Cut], results: Sequence[_Cut]) -> None:
        self._run, self._arguments, self._results = graph, tuple(arguments), tuple(results)

    @property
    def code(self) -> Any:
        """A value that is equal for graphs with equal operators on equal pieces."""
        return self._run.code, self._arguments, self._results

    @property
    def graph(self) -> fx.Graph:
        """The operators of the graph on whole values."""
        return self._run.graph

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        given = _join(self._arguments, values, [0] * len(self._arguments))
        return tuple(_split(self._results, tuple(run_graph(self._run, *given)), [0] * len(self._results)))


def _count(one: _Cut) -> int:
    return 1 if one is None else one.count


def _number(pieces: Sequence[_Cut]) -> int:
    return sum(map(_count, pieces))


def _for_each(pieces: Sequence[_Cut], values: Sequence[_T]) -> tuple[_T, ...]:
    """The value of each tensor, repeated for each of its pieces."""
    return tuple(value for one, value in zip(pieces, values, strict=True) for _ in range(_count(one)))


def _chosen(values: Sequence[_T], which: Sequence[bool]) -> list[_T]:
    return [value for value, choose in zip(values, which, strict=True) if choose]


def _split(pieces: Sequence[_Cut], values: Sequence[Any], leads: Sequence[int]) -> list[Any]:
    found: list[Any] = []
    for one, value, lead in zip(pieces, values, leads, strict=True):
        found += [value] if one is None else one.split(value, lead)
    return found


def _join(pieces: Sequence[_Cut], values: Sequence[Any], leads: Sequence[int]) -> list[Any]:
    found, at = [], 0
    for one, lead in zip(pieces, leads, strict=True):
        found.append(values[at] if one is None else one.join(values[at : at + one.count], lead))
        at += _count(one)
    return found
