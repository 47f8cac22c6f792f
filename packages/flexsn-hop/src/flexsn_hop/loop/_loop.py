"""Implementations of the two operators: loops over steps on dense tensors, and shapes of results for fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flexsn_hop._layout import BackwardLayout, ScanLayout, num_checkpoints
from flexsn_hop.formats import copy_in_order, dense_strides, order_like, sequence_order, stack_in_order, state_order
from flexsn_hop.loop._absent import Gradients, StepVJP, zeros
from flexsn_hop.loop._arguments import StepFunction
from flexsn_hop.loop._eager import CoreSteps, run_steps, stack_values, state_copies, step_values

__all__ = [
    "backward_loop",
    "backward_samples",
    "backward_shapes",
    "differentiated",
    "forward_loop",
    "forward_samples",
    "forward_shapes",
    "needed_carried",
]

Tensors = tuple[torch.Tensor, ...]


def forward_samples(layout: ScanLayout, flat_args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments of the core at the first step."""
    inputs, states, lifted = layout.split(flat_args)
    return (*(sequence.select(0, 0) for sequence in inputs), *states, *lifted)


def forward_loop(core: StepFunction, layout: ScanLayout, flat_args: Sequence[Any]) -> Tensors:
    """Computes the forward operator on dense tensors, for ``T >= 1``, with the results of ``eager_scan``."""
    inputs, states, lifted = layout.split(flat_args)
    steps = inputs[0].shape[0]
    interval = layout.checkpoint_interval
    before_segments = range(interval - 1, steps - 1, interval) if interval else range(0)
    requested = {*before_segments, steps - 1} if layout.final_state else range(steps)
    take_step = CoreSteps(core, lifted, layout.num_outputs)
    outputs_by_step, states_after = run_steps(take_step, inputs, states, requested)
    outputs = stack_values(inputs, states, outputs_by_step)
    if layout.final_state:
        state_results = state_copies(inputs, states, states_after[steps - 1])
    else:
        state_results = stack_values(inputs, states, list(states_after.values()))
    if not interval:
        return (*outputs, *state_results)
    checkpoints = []
    for index, state in enumerate(states):
        rows = [states_after[step][index] for step in before_segments]
        rows += [torch.zeros_like(state)] * layout.spare_checkpoints
        order = _find_checkpoint_order(state_order(state.shape, inputs, states))
        empty = state.new_empty((0, *state.shape))
        checkpoints.append(stack_in_order(rows, order) if rows else empty)
    return (*outputs, *state_results, *checkpoints)


def forward_shapes(core: StepFunction, layout: ScanLayout, flat_args: Sequence[Any]) -> Tensors:
    """Returns tensors like the results of the forward operator, but without values. Calls the core once."""
    inputs, states, lifted = layout.split(flat_args)
    first = [sequence[:1] for sequence in inputs]
    (outputs,), states_after = run_steps(CoreSteps(core, lifted, layout.num_outputs), first, states, [0])
    new_states = states_after[0]
    steps = inputs[0].shape[0]

    def over_time(value: torch.Tensor) -> torch.Tensor:
        return _allocate(value, (steps, *value.shape), sequence_order(value.shape, inputs, states))

    results = [over_time(output) for output in outputs]
    orders = [state_order(state.shape, inputs, states) for state in new_states]
    for state, order in zip(new_states, orders, strict=True):
        results.append(_allocate(state, state.shape, order) if layout.final_state else over_time(state))
    if layout.checkpoint_interval:
        rows = num_checkpoints(steps, layout.checkpoint_interval) + layout.spare_checkpoints
        for state, order in zip(new_states, orders, strict=True):
            results.append(_allocate(state, (rows, *state.shape), _find_checkpoint_order(order)))
    return tuple(results)


def _allocate(like: torch.Tensor, shape: Sequence[Any], order: Sequence[int]) -> torch.Tensor:
    return like.new_empty_strided(tuple(shape), dense_strides(shape, tuple(order)))


def _find_checkpoint_order(step: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of a checkpoint tensor whose rows have the order ``step``. Time is the outermost dimension."""
    return (0, *(d + 1 for d in step))


def backward_samples(layout: BackwardLayout, args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns example arguments of the step's VJP: the step's values, output gradients, and cotangents of states."""
    flat_args, _, output_grads, _ = layout.split(args)
    _, states, _ = layout.scan.split(flat_args)
    return (
        *forward_samples(layout.scan, flat_args),
        *(gradient.select(0, 0) for gradient in output_grads),
        *(torch.empty_like(state) for state, active in zip(states, layout.active_states, strict=True) if active),
    )


def backward_loop(core: StepFunction, vjp: StepFunction, layout: BackwardLayout, args: Sequence[Any]) -> Tensors:
    """Computes the backward operator on dense tensors, segment by segment, from the last segment to the first.

    The states within a segment are recomputed from the state before the segment.
    """
    flat_args, saved, output_grads, state_grads = layout.split(args)
    inputs, states, lifted = layout.scan.split(flat_args)
    steps = inputs[0].shape[0]
    inputs_by_step = list(zip(*(sequence.unbind(0) for sequence in inputs), strict=True))
    grads_by_step: Sequence[Tensors] = (
        list(zip(*(gradient.unbind(0) for gradient in output_grads), strict=True)) if output_grads else [()] * steps
    )
    step_vjp = StepVJP(vjp, len(flat_args))
    active = _select(states, layout.active_states)
    state_gradients = _StateGradients(layout, states, state_grads, steps)
    cotangents = state_gradients.initial()
    input_grads: list[Tensors] = []
    input_needs, _, lifted_needs = layout.scan.split(layout.needs)
    num_inputs, num_carried = sum(input_needs), len(cotangents)
    lifted_grads: Gradients = (None,) * sum(lifted_needs)
    for first, last, start in _iterate_segments_backwards(layout, states, saved, steps):
        states_before = [start]
        for step in range(first, last - 1):
            values = step_values(
                core(*inputs_by_step[step], *states_before[-1], *lifted),
                layout.scan.num_outputs,
                layout.scan.num_states,
            )
            states_before.append(values[layout.scan.num_outputs :])
        for step in range(last - 1, first - 1, -1):
            values = (*inputs_by_step[step], *states_before[step - first], *lifted)
            output_gradients = grads_by_step[step]
            gradients = step_vjp(
                values, (*output_gradients, *state_gradients.at(step, cotangents)), (*output_gradients, *active)
            )
            input_grads.append(_fill_absent(gradients[:num_inputs], _select(inputs_by_step[step], input_needs)))
            cotangents = gradients[num_inputs : num_inputs + num_carried]
            step_lifted_grads = gradients[num_inputs + num_carried :]
            lifted_grads = tuple(_add(old, new) for old, new in zip(lifted_grads, step_lifted_grads, strict=True))
    sequences = list(zip(*input_grads[::-1], strict=True))
    all_carried = _fill_absent(cotangents, active)
    carried = [all_carried[i] for i in needed_carried(layout)]
    of_lifted = _fill_absent(lifted_grads, _select(lifted, lifted_needs))
    orders = iter([order_like(argument) for argument in differentiated(layout, flat_args)])
    return (
        *[stack_in_order(gradients, next(orders)) for gradients in sequences],
        *[copy_in_order(gradient, next(orders)) for gradient in (*carried, *of_lifted)],
    )


def _select(values: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [value for value, need in zip(values, needs, strict=True) if need]


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _fill_absent(gradients: Gradients, like: Sequence[torch.Tensor]) -> Tensors:
    """Returns the gradients, with zeros for absent gradients."""
    pairs = zip(gradients, like, strict=True)
    return tuple(zeros(value) if gradient is None else gradient for gradient, value in pairs)


def backward_shapes(vjp: StepFunction, layout: BackwardLayout, args: Sequence[Any], samples: Sequence[Any]) -> Tensors:
    """Returns tensors like the results of the backward operator, but without values. Calls the VJP once."""
    flat_args, *_ = layout.split(args)
    gradients = tuple(vjp(*samples))
    num_inputs = sum(layout.needs[: layout.scan.num_inputs])
    num_carried = sum(layout.active_states)
    carried = gradients[num_inputs : num_inputs + num_carried]
    requested = (
        *gradients[:num_inputs],
        *(carried[i] for i in needed_carried(layout)),
        *gradients[num_inputs + num_carried :],
    )
    arguments = differentiated(layout, flat_args)
    return tuple(
        _allocate(gradient, argument.shape, order_like(argument))
        for gradient, argument in zip(requested, arguments, strict=True)
    )


def differentiated(layout: BackwardLayout, flat_args: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the arguments whose gradients are the results of the backward, in the order of the results."""
    return [argument for argument, need in zip(flat_args, layout.needs, strict=True) if need]


def needed_carried(layout: BackwardLayout) -> list[int]:
    """Returns the positions, among the active states, of the states whose initial value needs a gradient."""
    _, needs, _ = layout.scan.split(layout.needs)
    flags = zip(needs, layout.active_states, strict=True)
    carried = [need for need, active in flags if active]
    return [index for index, need in enumerate(carried) if need]


def _iterate_segments_backwards(
    layout: BackwardLayout, states: Sequence[Any], saved: Sequence[Any], steps: int
) -> Iterator[tuple[int, int, Tensors]]:
    """Iterates over the first step, the end (exclusive) and the initial states of each segment, last segment first."""
    interval = layout.saved_interval
    states_before = [tuple(states), *zip(*(sequence.unbind(0) for sequence in saved), strict=True)]
    for segment in range(num_checkpoints(steps, interval), -1, -1):
        first = segment * interval
        yield first, min(first + interval, steps), states_before[segment] if states else ()


class _StateGradients:
    """The gradients of the results of active states. Absent gradients are None."""

    def __init__(self, layout: BackwardLayout, states: Sequence[Any], gradients: Sequence[Any], steps: int) -> None:
        remaining = iter(gradients)
        by_state = [next(remaining) if present else None for present in layout.state_grads]
        active = list(zip(states, by_state, layout.active_states, strict=True))
        self._final = layout.scan.final_state
        self._gradients = [gradient for _, gradient, is_active in active if is_active]
        self._by_step = [
            None if gradient is None or self._final else gradient.unbind(0) for gradient in self._gradients
        ]

    def initial(self) -> Gradients:
        """Returns the cotangents of the states after the last step."""
        return tuple(gradient if self._final else None for gradient in self._gradients)

    def at(self, step: int, cotangents: Gradients) -> Gradients:
        """Returns the carried cotangents plus the gradients of the state results at ``step``."""
        return tuple(
            carried if sequence is None else _add(carried, sequence[step])
            for carried, sequence in zip(cotangents, self._by_step, strict=True)
        )
