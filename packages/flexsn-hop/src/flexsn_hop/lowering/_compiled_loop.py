"""The two operators as loops over Inductor's code for one step.

The code for a step writes its results to memory that is allocated before the loop: to the rows of the sequences that
the operators return, and to two alternating rows for a state whose sequence is not returned. The loop only calls the
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx

from flexsn_hop._layout import BackwardLayout, ScanLayout, num_checkpoints
from flexsn_hop._torch_private import RowsOf, fake_results
from flexsn_hop.formats import Order, copy_in_order, dense_strides, order_like, sequence_order, state_order
from flexsn_hop.loop._absent import StepVJP, zeros
from flexsn_hop.loop._loop import differentiated, needed_carried
from flexsn_hop.lowering._step_graphs import (
    BLOCK,
    BackwardStep,
    WritingStep,
    backward_step,
    bind_sizes,
    forward_step,
)

__all__ = ["CompiledBackward", "CompiledForward", "has_no_elements"]

Tensors = tuple[torch.Tensor, ...]
Rows = Sequence[torch.Tensor]
"""One tensor for each step. All tensors have the same layout."""


def has_no_elements(layout: ScanLayout | BackwardLayout, args: Sequence[Any]) -> bool:
    """True if an argument of the forward operator has no elements. A step has no compiled code in this case."""
    forward = args[: layout.num_given] if isinstance(layout, BackwardLayout) else args
    return any(value.numel() == 0 for value in _list_tensors(forward))


Plan = TypeVar("Plan")


class _Plans(Generic[Plan]):
    """A cache of plans by the layouts of the arguments, since making a plan takes longer than running many steps."""

    _MOST = 64

    def __init__(self, make: Callable[[Sequence[Any]], Plan]) -> None:
        self._make = make
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def of(self, args: Sequence[Any]) -> Plan:
        key = tuple(
            (arg.shape, arg.stride(), arg.dtype, arg.device) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == self._MOST:
                self._plans.clear()
            plan = self._plans[key] = self._make(args)
        return plan


class CompiledForward:
    """The forward operator as a loop over Inductor's code for a step.

    Its results equal the results of ``eager_scan`` as far as Inductor's code for a step computes the same values.
    """

    def __init__(self, core: fx.GraphModule, layout: ScanLayout) -> None:
        self._core = core
        self._layout = layout
        self._steps: dict[tuple[Any, ...], tuple[WritingStep, list[torch.Tensor]]] = {}
        self._plans = _Plans(self._make_plan)

    def __call__(self, flat_args: Sequence[Any]) -> Tensors:
        """Runs the operator for ``T >= 1``.

        Raises:
            StepCodeError: Inductor cannot generate code for the step.
        """
        layout = self._layout
        plan = self._plans.of(flat_args)
        inputs, states, lifted = layout.split(flat_args)
        steps = plan.steps
        constants = _list_tensors(lifted)
        sequences = [_copy_to_order(*pair) for pair in zip(inputs, plan.input_orders, strict=True)]
        outputs = [memory.empty() for memory in plan.outputs]
        memories = [_StateMemory(*pair, steps) for pair in zip(plan.states, states, strict=True)]
        for first in range(0, steps, BLOCK):
            last = min(first + BLOCK, steps)
            of_states = [memory.rows(first, last) for memory in memories]
            columns = [
                *(befores for befores, _ in of_states),
                *([value] * (last - first) for value in constants),
                *(RowsOf(sequence, range(first, last)) for sequence in outputs),
                *(afters for _, afters in of_states),
            ]
            plan.step.run(range(last - first), [sequence[first:last] for sequence in sequences], columns)
        results = [_arrange(*pair) for pair in zip(outputs, plan.output_orders, strict=True)]
        results += [memory.result() for memory in memories]
        return (*results, *(memory.checkpoints for memory in memories if layout.checkpoint_interval))

    def _make_plan(self, flat_args: Sequence[Any]) -> _ForwardPlan:
        layout = self._layout
        inputs, states, lifted = layout.split(flat_args)
        steps = inputs[0].shape[0]
        input_orders = [_find_needed_order(sequence) for sequence in inputs]
        rows = [_copy_to_order(*pair)[0] for pair in zip(inputs, input_orders, strict=True)]
        step, likes = self._find_step(flat_args, [*rows, *states, *_list_tensors(lifted)])
        orders = [sequence_order(like.shape, inputs, states) for like in likes[: layout.num_outputs]]
        return _ForwardPlan(
            step,
            steps,
            input_orders,
            [_Memory.of(steps, *pair) for pair in zip(likes, orders, strict=False)],
            orders,
            [_StatePlan.of(layout, steps, inputs, states, state) for state in states],
        )

    def _find_step(self, flat_args: Sequence[Any], rows: Rows) -> tuple[WritingStep, list[torch.Tensor]]:
        """Returns the step, and fake tensors with the shapes and dtypes of its results."""
        sizes = tuple(value for value in flat_args if not isinstance(value, torch.Tensor))
        key = (sizes, *((row.shape, row.dtype, row.device) for row in rows))
        if key not in self._steps:
            core = bind_sizes(self._core, flat_args)
            self._steps[key] = forward_step(core, self._layout), fake_results(core, rows)
        return self._steps[key]


class _Memory(NamedTuple):
    """The layout of memory with one row for each step."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, steps: int, like: torch.Tensor, order: Order) -> _Memory:
        """Describes adjacent rows, whose dimensions have the order ``order`` without the time dimension."""
        shape = (steps, *like.shape)
        return cls(shape, dense_strides(shape, (0, *(d for d in order if d != 0))), like.dtype, like.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _ForwardPlan(NamedTuple):
    """The step and the memory layouts of a forward, which depend only on the layouts of the arguments.

    Attributes:
        step, steps: The step, and the number of steps.
        input_orders: For each input, the order of dimensions of its copy, or None if the input is not copied.
        outputs: The layout of memory for each output.
        output_orders: For each output, the order of dimensions of the result.
        states: The layouts of memory for each state.
    """

    step: WritingStep
    steps: int
    input_orders: Sequence[Order | None]
    outputs: Sequence[_Memory]
    output_orders: Sequence[Order]
    states: Sequence[_StatePlan]


class _StatePlan(NamedTuple):
    """The layouts of memory for a state.

    Attributes:
        checkpoint_steps: The steps whose new states are checkpoints.
        checkpoints: The layout of the checkpoints.
        scratch: The layout of the two alternating rows.
        sequence: The layout of the states after all steps, or None if only the last state is a result.
        order: The order of the result's dimensions. If only the last state is a result, the order of ``scratch``.
    """

    checkpoint_steps: range
    checkpoints: _Memory
    scratch: _Memory
    sequence: _Memory | None
    order: Order

    @classmethod
    def of(
        cls, layout: ScanLayout, steps: int, inputs: Sequence[Any], states: Sequence[Any], initial: torch.Tensor
    ) -> _StatePlan:
        interval = layout.checkpoint_interval
        checkpoint_steps = range(interval - 1, steps - 1, interval) if interval else range(0)
        row_order = (0, *(d + 1 for d in state_order(initial.shape, inputs, states)))
        order = row_order if layout.final_state else sequence_order(initial.shape, inputs, states)
        return cls(
            checkpoint_steps,
            _Memory.of(len(checkpoint_steps) + layout.spare_checkpoints, initial, row_order),
            _Memory.of(2, initial, order),
            None if layout.final_state else _Memory.of(steps, initial, order),
            order,
        )


class _StateMemory:
    """Memory for a state before and after each step. All rows have the same layout.

    Attributes:
        checkpoints: The states before each segment except for the first segment.
    """

    def __init__(self, plan: _StatePlan, initial: torch.Tensor, steps: int) -> None:
        self._checkpoint_steps = plan.checkpoint_steps
        self._steps = steps
        self.checkpoints = plan.checkpoints.empty()
        self.checkpoints[len(self._checkpoint_steps) :].zero_()
        self._order = plan.order
        self._sequence = None if plan.sequence is None else plan.sequence.empty()
        self._scratch = plan.scratch.empty().unbind(0)
        self._current = _copy_like_rows(initial, self._scratch)

    def rows(self, first: int, last: int) -> tuple[Rows, Rows]:
        """Returns rows for the state before and after each of these steps.

        Call this method once for each block of steps, in the order of the blocks.
        """
        if self._sequence is not None:
            afters = [*RowsOf(self._sequence, range(first, last))]
        else:
            afters = [self._scratch[step % 2] for step in range(first, last)]
            if last == self._steps:
                afters[-1] = torch.empty_like(self._scratch[0])  # the result has separate memory
            checkpoint_indices = self._find_checkpoints(first, last)
            for index, checkpoint in zip(checkpoint_indices, RowsOf(self.checkpoints, checkpoint_indices), strict=True):
                afters[self._checkpoint_steps[index] - first] = checkpoint
        befores = [self._current, *afters[:-1]]
        self._current = afters[-1]
        return befores, afters

    def _find_checkpoints(self, first: int, last: int) -> range:
        if not self._checkpoint_steps:
            return range(0)
        start, interval = self._checkpoint_steps.start, self._checkpoint_steps.step
        before = max(0, -((start - first) // interval))
        return range(before, min(len(self._checkpoint_steps), max(0, -((start - last) // interval))))

    def result(self) -> torch.Tensor:
        """Returns the last state, or the states after all steps."""
        if self._sequence is None:
            return self._current
        if self._checkpoint_steps:
            checkpoint_rows = self._sequence[
                self._checkpoint_steps.start : self._steps - 1 : self._checkpoint_steps.step
            ]
            self.checkpoints[: len(self._checkpoint_steps)].copy_(checkpoint_rows)
        return _arrange(self._sequence, self._order)


class CompiledBackward:
    """The backward operator, as a loop over Inductor's code for the VJP of a step.

    Some cotangents may be absent for a few steps, for example if a final state has no gradient. If the set of present
    cotangents changes in a step, this step runs operator by operator. All other steps run Inductor's code.
    """

    def __init__(self, core: fx.GraphModule, vjp: fx.GraphModule, layout: BackwardLayout) -> None:
        self._core = core
        self._vjp = vjp
        self._layout = layout
        self._graphs: dict[tuple[Any, ...], _BackwardGraphs] = {}

    def __call__(self, args: Sequence[Any]) -> Tensors:
        """Runs the operator for ``T >= 1``.

        Raises:
            StepCodeError: Inductor cannot generate code for the step or its VJP.
        """
        flat_args, *_ = self._layout.split(args)
        sizes = tuple(value for value in flat_args if not isinstance(value, torch.Tensor))
        if sizes not in self._graphs:
            self._graphs[sizes] = _BackwardGraphs.bound(self._core, self._vjp, self._layout, flat_args)
        return _BackwardRun(self._graphs[sizes], self._layout, args).results()


class _BackwardGraphs:
    """The graphs of a backward, for fixed values of its size arguments."""

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
        num_values = len(_list_tensors(flat_args))
        step_vjp = StepVJP(bind_sizes(vjp, flat_args), num_values)
        forward = forward_step(bind_sizes(core, flat_args), layout.scan, skipped=layout.scan.num_outputs)
        return cls(forward, step_vjp, layout, num_values)

    def backward(self, carried: Sequence[bool], in_sequences: Sequence[bool]) -> BackwardStep:
        """Returns the step for the present cotangents. All calls must pass the same ``in_sequences``."""
        key = tuple(carried)
        if key not in self._steps:
            self._steps[key] = backward_step(self._vjp, self._layout, self._num_values, carried, in_sequences)
        return self._steps[key]


@dataclass
class _Carried:
    """The cotangent of one state, and two alternating rows for the cotangents of earlier steps."""

    current: torch.Tensor | None
    memory: Rows

    def following(self, steps: int) -> Rows:
        """Returns rows for the cotangents that the next ``steps`` steps of the backward compute."""
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
        self._inputs = [_make_time_major(sequence) for sequence in inputs]
        self._constants = _list_tensors(lifted)
        self._gradients = [_make_time_major(gradient) for gradient in output_grads]
        self._states = states
        self._saved = [_make_time_major(sequence) for sequence in saved]

        input_needs, _, lifted_needs = layout.scan.split(layout.needs)
        self._input_grads = [_allocate_rows(x.shape[0], x[0], order_like(x)) for x in _select(inputs, input_needs)]
        self._sums = [_allocate(value, order_like(value)).zero_() for value in _select(lifted, lifted_needs)]
        remaining = iter(state_grads)
        by_state = [next(remaining) if present else None for present in layout.state_grads]
        by_state = _select(by_state, layout.active_states)
        is_final = layout.scan.final_state
        self._by_step = [None if gradient is None or is_final else _make_time_major(gradient) for gradient in by_state]
        self._carried = []
        for state, gradient in zip(_select(states, layout.active_states), by_state, strict=True):
            memory = _allocate_rows(2, state, (0, *(d + 1 for d in order_like(state)))).unbind(0)
            current = None if gradient is None or not is_final else _copy_like_rows(gradient, memory)
            self._carried.append(_Carried(current, memory))

    def results(self) -> Tensors:
        for first, last, befores in self._iterate_segments():
            while last > first:
                last = self._run_block(first, last, befores)
        states = _select(self._states, self._layout.active_states)
        carried = [
            zeros(state) if carried.current is None else carried.current
            for carried, state in zip(self._carried, states, strict=True)
        ]
        matches = [*(carried[index] for index in needed_carried(self._layout))]
        orders = [order_like(argument) for argument in differentiated(self._layout, self._flat_args)]
        num_inputs = len(self._input_grads)
        sequences = zip(self._input_grads, orders[:num_inputs], strict=True)
        copies = zip(matches, orders[num_inputs:], strict=False)
        return (
            *(_arrange(*pair) for pair in sequences),
            *(copy_in_order(*pair) for pair in copies),
            *self._sums,
        )

    def _run_block(self, first: int, last: int, befores: Sequence[torch.Tensor]) -> int:
        """Computes a block of steps before ``last``, or one step if the set of present cotangents changes.

        Returns the first of the computed steps, which is at least ``first``. ``befores`` contains the states before the
        steps from ``first`` on.
        """
        present = [carried.current is not None for carried in self._carried]
        step = self._graphs.backward(present, [sequence is not None for sequence in self._by_step])
        is_steady = list(step.states) == present
        begin = max(first, last - BLOCK) if is_steady else last - 1
        count = last - begin

        before, after = [], []
        for carried, is_present, is_carried in zip(self._carried, present, step.states, strict=True):
            afters = carried.following(count)
            if is_present:
                assert carried.current is not None
                before.append([carried.current, *afters[:-1]])
            if is_carried:
                after.append(afters)
            carried.current = afters[-1] if is_carried else None
        for sequence, is_present in zip(self._input_grads, step.inputs, strict=True):
            if not is_present:
                sequence[begin:last].zero_()
        by_step = [*self._gradients, *(sequence for sequence in self._by_step if sequence is not None)]
        sequences = [
            *(sequence[begin:last] for sequence in self._inputs),
            *(states[begin - first : last - first] for states in befores),
            *(sequence[begin:last] for sequence in by_step),
        ]
        columns = [
            *([value] * count for value in self._constants),
            *before,
            *(RowsOf(sequence, range(last - 1, begin - 1, -1)) for sequence in _select(self._input_grads, step.inputs)),
            *after,
            *([value] * count for value in _select(self._sums, step.lifted)),
        ]
        if is_steady:
            step.step.run(range(count - 1, -1, -1), sequences, columns)
        else:
            step.step.module(0, *sequences, *(rows[0] for rows in columns))
        return begin

    def _iterate_segments(self) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Iterates over the segments, from the last segment to the first.

        Yields the first step of a segment, the step after the segment, and the states before the segment's steps. The
        memory of these states is reused for the next segment.
        """
        interval = min(self._layout.saved_interval, self._steps)
        number = num_checkpoints(self._steps, self._layout.saved_interval)
        pairs = list(zip(self._states, self._saved, strict=True))
        like = [saved[0] if number else state for state, saved in pairs]
        if interval == 1:
            if number:
                yield 1, self._steps, [saved[:number] for saved in self._saved]
            rows = [_copy_like_rows(state, [row]) for state, row in zip(self._states, like, strict=True)]
            yield 0, 1, [row.as_strided((1, *row.shape), (row.numel(), *row.stride())) for row in rows]
            return
        memory = [_allocate_rows(interval, row, (0, *(d + 1 for d in order_like(row)))) for row in like]
        for segment in range(number, -1, -1):
            first = segment * self._layout.saved_interval
            last = min(first + interval, self._steps)
            for (state, saved), sequence in zip(pairs, memory, strict=True):
                sequence[0].copy_(saved[segment - 1] if segment else state)
            self._recompute_states(first, last, memory)
            yield first, last, memory

    def _recompute_states(self, first: int, last: int, memory: Sequence[torch.Tensor]) -> None:
        """Recomputes the states before all steps of a segment from the state before its first step."""
        for begin in range(first, last - 1, BLOCK) if memory else ():
            count = min(begin + BLOCK, last - 1) - begin
            start = begin - first
            columns = [
                *(RowsOf(sequence, range(start, start + count)) for sequence in memory),
                *([value] * count for value in self._constants),
                *(RowsOf(sequence, range(start + 1, start + count + 1)) for sequence in memory),
            ]
            self._graphs.forward.run(
                range(count), [sequence[begin : begin + count] for sequence in self._inputs], columns
            )


def _list_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _select(values: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [value for value, need in zip(values, needs, strict=True) if need]


def _allocate(like: torch.Tensor, order: Order) -> torch.Tensor:
    return torch.empty_strided(like.shape, dense_strides(like.shape, order), dtype=like.dtype, device=like.device)


def _allocate_rows(steps: int, like: torch.Tensor, order: Order) -> torch.Tensor:
    """Allocates adjacent rows, whose dimensions have the order ``order`` without the time dimension."""
    shape = (steps, *like.shape)
    strides = dense_strides(shape, (0, *(d for d in order if d != 0)))
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _arrange(sequence: torch.Tensor, order: Order) -> torch.Tensor:
    """Reorders a sequence whose rows are adjacent. Copies the sequence unless ``order`` begins with time."""
    return sequence if order[0] == 0 else copy_in_order(sequence, order)


def _make_time_major(sequence: torch.Tensor) -> torch.Tensor:
    """Returns the sequence with dense, adjacent rows. The layout of a row is then the same for any number of steps."""
    return _copy_to_order(sequence, _find_needed_order(sequence))


def _find_needed_order(sequence: torch.Tensor) -> Order | None:
    """Returns the order of a copy with dense, adjacent rows, or None if the sequence already has such rows."""
    order = (0, *(d for d in order_like(sequence) if d != 0))
    return None if sequence.stride() == dense_strides(sequence.shape, order) else order


def _copy_to_order(sequence: torch.Tensor, order: Order | None) -> torch.Tensor:
    return sequence if order is None else copy_in_order(sequence, order)


def _copy_like_rows(value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns the value in the layout of the rows, as a copy if necessary."""
    if value.stride() == rows[0].stride():
        return value
    return torch.empty_like(rows[0]).copy_(value)
