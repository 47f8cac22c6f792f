"""The two operators as loops over Inductor's code for one step.

The code writes its results into memory for all steps: the rows of the sequences that the operators give, and two
rows that alternate where a state is not kept. The loop calls it, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flexsn_hop._formats import Order, copy_in_order, dense_strides, order_like, sequence_order, state_order
from flexsn_hop._layout import BackwardLayout, ScanLayout, num_checkpoints
from flexsn_hop._torch_private import fake_results
from flexsn_hop.lowering._step_graphs import BackwardStep, WritingStep, backward_step, bind_sizes, forward_step
from flexsn_hop.operator._absent import StepVJP, zeros
from flexsn_hop.operator._loop import differentiated, needed_carried

__all__ = ["CompiledBackward", "CompiledForward", "has_no_elements"]

Tensors = tuple[torch.Tensor, ...]
Rows = Sequence[torch.Tensor]
"""A tensor for each step, all of one layout."""


def has_no_elements(layout: ScanLayout | BackwardLayout, args: Sequence[Any]) -> bool:
    """True if an argument of the forward operator is empty: code for a step has nothing to do."""
    forward = args[: layout.num_given] if isinstance(layout, BackwardLayout) else args
    return any(value.numel() == 0 for value in _tensors(forward))


class CompiledForward:
    """The forward operator. Equals ``eager_scan`` as far as Inductor's code for a step equals the step."""

    def __init__(self, core: fx.GraphModule, layout: ScanLayout) -> None:
        self._core = core
        self._layout = layout
        self._steps: dict[tuple[Any, ...], tuple[WritingStep, list[torch.Tensor]]] = {}

    def __call__(self, flat_args: Sequence[Any]) -> Tensors:
        """Run it, for ``T >= 1``.

        Raises:
            StepCodeError: Inductor has no code for the step.
        """
        layout = self._layout
        inputs, states, lifted = layout.split(flat_args)
        steps = inputs[0].shape[0]
        constants = _tensors(lifted)
        slices: list[Rows] = [_time_major(sequence).unbind(0) for sequence in inputs]
        step, likes = self._step(flat_args, [*(rows[0] for rows in slices), *states, *constants])
        orders = [sequence_order(like.shape, inputs, states) for like in likes]
        outputs = [_sequence(steps, *pair) for pair in zip(likes[: layout.num_outputs], orders, strict=False)]
        memories = [_StateMemory(layout, steps, inputs, states, state) for state in states]
        _run(
            step,
            [
                *slices,
                *(memory.befores for memory in memories),
                *([value] * steps for value in constants),
                *(sequence.unbind(0) for sequence in outputs),
                *(memory.afters for memory in memories),
            ],
        )
        results = [_in_order(*pair) for pair in zip(outputs, orders, strict=False)]
        results += [memory.result() for memory in memories]
        return (*results, *(memory.checkpoints for memory in memories if layout.checkpoint_interval))

    def _step(self, flat_args: Sequence[Any], rows: Rows) -> tuple[WritingStep, list[torch.Tensor]]:
        """The step, and fake tensors like its results."""
        sizes = tuple(value for value in flat_args if not isinstance(value, torch.Tensor))
        key = (sizes, *((row.shape, row.dtype, row.device) for row in rows))
        if key not in self._steps:
            core = bind_sizes(self._core, flat_args)
            self._steps[key] = forward_step(core), fake_results(core, rows)
        return self._steps[key]


class _StateMemory:
    """Memory for a state before and after each step, in one layout.

    Attributes:
        befores, afters: The state before and after each step.
        checkpoints: The states that the layout's interval keeps.
    """

    def __init__(
        self, layout: ScanLayout, steps: int, inputs: Sequence[Any], states: Sequence[Any], initial: torch.Tensor
    ) -> None:
        interval = layout.checkpoint_interval
        kept = range(interval - 1, steps - 1, interval) if interval else range(0)
        self._final_state = layout.final_state
        row_order = state_order(initial.shape, inputs, states)
        self._order: Order = (0, *(d + 1 for d in row_order))
        self.checkpoints = _sequence(len(kept) + layout.spare_checkpoints, initial, self._order)
        self.checkpoints[len(kept) :].zero_()
        if layout.final_state:
            scratch = _sequence(2, initial, self._order).unbind(0)
            self.afters = [scratch[step % 2] for step in range(steps)]
            for row, step in zip(self.checkpoints.unbind(0), kept, strict=False):
                self.afters[step] = row
            self.afters[-1] = _sequence(1, initial, self._order)[0]
        else:
            self._order = sequence_order(initial.shape, inputs, states)
            self._sequence = _sequence(steps, initial, self._order)
            self.afters = list(self._sequence.unbind(0))
            self._kept = kept
        self.befores = [_like_rows(initial, self.afters), *self.afters[:-1]]

    def result(self) -> torch.Tensor:
        """The last state, or the states after all steps."""
        if self._final_state:
            return self.afters[-1]
        for row, step in zip(self.checkpoints.unbind(0), self._kept, strict=False):
            row.copy_(self.afters[step])
        return _in_order(self._sequence, self._order)


class CompiledBackward:
    """The backward operator, as a loop over Inductor's code for the VJP of a step.

    Steps whose cotangents are absent for a while, as those of a state that has none at the end, are run operator by
    operator: code is compiled for what is present in the steps after them.
    """

    def __init__(self, core: fx.GraphModule, vjp: fx.GraphModule, layout: BackwardLayout) -> None:
        self._core = core
        self._vjp = vjp
        self._layout = layout
        self._graphs: dict[tuple[Any, ...], _BackwardGraphs] = {}

    def __call__(self, args: Sequence[Any]) -> Tensors:
        """Run it, for ``T >= 1``.

        Raises:
            StepCodeError: Inductor has no code for the step or its VJP.
        """
        flat_args, *_ = self._layout.split(args)
        sizes = tuple(value for value in flat_args if not isinstance(value, torch.Tensor))
        if sizes not in self._graphs:
            self._graphs[sizes] = _BackwardGraphs.bound(self._core, self._vjp, self._layout, flat_args)
        return _BackwardRun(self._graphs[sizes], self._layout, args).results()


class _BackwardGraphs:
    """The graphs of a backward, for given sizes among its arguments."""

    def __init__(self, forward: WritingStep, vjp: StepVJP, layout: BackwardLayout, num_values: int) -> None:
        self.forward = forward
        self._vjp = vjp
        self._layout = layout
        self._num_values = num_values
        self._steps: dict[tuple[bool, ...], BackwardStep] = {}

    @classmethod
    def bound(
        cls, core: fx.GraphModule, vjp: fx.GraphModule, layout: BackwardLayout, flat_args: Sequence[Any]
    ) -> _BackwardGraphs:
        num_values = len(_tensors(flat_args))
        step_vjp = StepVJP(bind_sizes(vjp, flat_args), num_values)
        forward = forward_step(bind_sizes(core, flat_args), skipped=layout.scan.num_outputs)
        return cls(forward, step_vjp, layout, num_values)

    def backward(self, carried: Sequence[bool], in_sequences: Sequence[bool]) -> BackwardStep:
        """The step for what is present; a graph has the same ``in_sequences`` in all of its calls."""
        key = tuple(carried)
        if key not in self._steps:
            self._steps[key] = backward_step(self._vjp, self._layout, self._num_values, carried, in_sequences)
        return self._steps[key]


@dataclass
class _Carried:
    """The cotangent of one state: the current one, and memory that alternates."""

    current: torch.Tensor | None
    memory: Rows

    def following(self, steps: int) -> Rows:
        """Memory for the cotangents after the current one."""
        first = 1 if self.current is self.memory[0] else 0
        return [self.memory[(first + step) % 2] for step in range(steps)]


class _BackwardRun:
    """One call of the backward operator."""

    def __init__(self, graphs: _BackwardGraphs, layout: BackwardLayout, args: Sequence[Any]) -> None:
        flat_args, saved, output_grads, state_grads = layout.split(args)
        inputs, states, lifted = layout.scan.split(flat_args)
        self._graphs = graphs
        self._layout = layout
        self._flat_args = flat_args
        self._steps: int = inputs[0].shape[0]
        self._slices: list[Rows] = [_time_major(sequence).unbind(0) for sequence in inputs]
        self._constants = _tensors(lifted)
        self._gradients: list[Rows] = [_time_major(gradient).unbind(0) for gradient in output_grads]
        self._states = states
        self._saved = [_time_major(sequence) for sequence in saved]

        input_needs, _, lifted_needs = layout.scan.split(layout.needs)
        self._input_grads = [_sequence(x.shape[0], x[0], order_like(x)) for x in _needed(inputs, input_needs)]
        self._input_rows: list[Rows] = [sequence.unbind(0) for sequence in self._input_grads]
        self._sums = [_empty(value, order_like(value)).zero_() for value in _needed(lifted, lifted_needs)]
        came = iter(state_grads)
        by_state = [next(came) if present else None for present in layout.state_grads]
        by_state = _needed(by_state, layout.active_states)
        is_final = layout.scan.final_state
        self._by_step: list[Rows | None] = [
            None if gradient is None or is_final else _time_major(gradient).unbind(0) for gradient in by_state
        ]
        self._carried = []
        for state, gradient in zip(_needed(states, layout.active_states), by_state, strict=True):
            memory = _sequence(2, state, (0, *(d + 1 for d in order_like(state)))).unbind(0)
            current = None if gradient is None or not is_final else _like_rows(gradient, memory)
            self._carried.append(_Carried(current, memory))

    def results(self) -> Tensors:
        for first, befores in self._segments():
            last = first + len(befores[0]) if befores else self._steps
            while last > first:
                last = self._walk_back(first, last, befores)
        states = _needed(self._states, self._layout.active_states)
        carried = [
            zeros(state) if carried.current is None else carried.current
            for carried, state in zip(self._carried, states, strict=True)
        ]
        found = [*(carried[index] for index in needed_carried(self._layout))]
        orders = [order_like(argument) for argument in differentiated(self._layout, self._flat_args)]
        num_inputs = len(self._input_grads)
        sequences = zip(self._input_grads, orders[:num_inputs], strict=True)
        copies = zip(found, orders[num_inputs:], strict=False)
        return (
            *(_in_order(*pair) for pair in sequences),
            *(copy_in_order(*pair) for pair in copies),
            *self._sums,
        )

    def _walk_back(self, first: int, last: int, befores: Sequence[Rows]) -> int:
        """Go back from step ``last``, to ``first`` where what is present stays so; else by one step."""
        present = [carried.current is not None for carried in self._carried]
        step = self._graphs.backward(present, [rows is not None for rows in self._by_step])
        is_steady = list(step.states) == present
        begin = first if is_steady else last - 1
        count = last - begin

        def back(rows: Rows, start: int = 0) -> Rows:
            return rows[begin - start : last - start][::-1]

        before, after = [], []
        for carried, is_there, will_be in zip(self._carried, present, step.states, strict=True):
            afters = carried.following(count)
            if is_there:
                assert carried.current is not None
                before.append([carried.current, *afters[:-1]])
            if will_be:
                after.append(afters)
            carried.current = afters[-1] if will_be else None
        for rows, is_there in zip(self._input_rows, step.inputs, strict=True):
            for row in () if is_there else back(rows):
                row.zero_()
        columns = [
            *(back(rows) for rows in self._slices),
            *(back(rows, first) for rows in befores),
            *([value] * count for value in self._constants),
            *(back(rows) for rows in self._gradients),
            *before,
            *(back(rows) for rows in self._by_step if rows is not None),
            *(back(rows) for rows in _needed(self._input_rows, step.inputs)),
            *after,
            *([value] * count for value in _needed(self._sums, step.lifted)),
        ]
        if is_steady:
            _run(step.step, columns)
        else:
            step.step.module(*(rows[0] for rows in columns))
        return begin

    def _segments(self) -> Iterator[tuple[int, list[Rows]]]:
        """The first step of each segment from the last one, and the states before its steps."""
        interval = self._layout.saved_interval
        number = num_checkpoints(self._steps, interval)
        starts = []
        for state, saved in zip(self._states, self._saved, strict=True):
            rows = saved.unbind(0)[:number]
            starts.append([_like_rows(state, rows or [state]), *rows])
        if interval == 1:
            yield 0, starts
            return
        length = min(interval, self._steps)
        within = [_sequence(length, rows[0], (0, *(d + 1 for d in order_like(rows[0])))).unbind(0) for rows in starts]
        for segment in range(number, -1, -1):
            first = segment * interval
            count = min(interval, self._steps - first)
            befores = []
            for rows, memory in zip(starts, within, strict=True):
                memory[0].copy_(rows[segment])
                befores.append(memory[:count])
            if count > 1:
                self._compute_again(first, befores)
            yield first, befores

    def _compute_again(self, first: int, befores: Sequence[Rows]) -> None:
        """Fill the states before the steps of a segment, but the first one."""
        count = len(befores[0]) - 1 if befores else 0
        if count == 0:
            return
        _run(
            self._graphs.forward,
            [
                *(rows[first : first + count] for rows in self._slices),
                *(rows[:-1] for rows in befores),
                *([value] * count for value in self._constants),
                *(rows[1:] for rows in befores),
            ],
        )


def _run(step: WritingStep, columns: Sequence[Rows]) -> None:
    code = step.code(columns)
    for args in zip(*columns, strict=True):
        code([*args])


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _needed(values: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [value for value, need in zip(values, needs, strict=True) if need]


def _empty(like: torch.Tensor, order: Order) -> torch.Tensor:
    return torch.empty_strided(like.shape, dense_strides(like.shape, order), dtype=like.dtype, device=like.device)


def _sequence(steps: int, like: torch.Tensor, order: Order) -> torch.Tensor:
    """Memory for a value of each step, one after the other, in the order of a sequence ``order`` without its time."""
    shape = (steps, *like.shape)
    strides = dense_strides(shape, (0, *(d for d in order if d != 0)))
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _in_order(sequence: torch.Tensor, order: Order) -> torch.Tensor:
    """The sequence in this order: as it is, if time leads there."""
    return sequence if order[0] == 0 else copy_in_order(sequence, order)


def _time_major(sequence: torch.Tensor) -> torch.Tensor:
    """The sequence with dense rows, one after the other: the layout of a row says nothing of the number of steps."""
    order = order_like(sequence)
    ours = (0, *(d for d in order if d != 0))
    if sequence.stride() == dense_strides(sequence.shape, ours):
        return sequence
    return copy_in_order(sequence, ours)


def _like_rows(value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The value in the layout of the rows."""
    if value.stride() == rows[0].stride():
        return value
    return torch.empty_like(rows[0]).copy_(value)
