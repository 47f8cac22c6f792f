"""The two operators as loops over steps, on dense tensors and, for shapes only, on fake ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._arguments import StepFunction
from ._eager import run_steps, stack_steps, step_values
from ._layout import BackwardLayout, ScanLayout

__all__ = [
    "backward_loop",
    "backward_samples",
    "backward_shapes",
    "forward_loop",
    "forward_samples",
    "forward_shapes",
]

Tensors = tuple[torch.Tensor, ...]


def forward_samples(layout: ScanLayout, flat_args: Sequence[Any]) -> tuple[Any, ...]:
    """What the core takes at the first step."""
    inputs, states, lifted = layout.split(flat_args)
    return (*(sequence.select(0, 0) for sequence in inputs), *states, *lifted)


def forward_loop(core: StepFunction, layout: ScanLayout, flat_args: Sequence[Any]) -> Tensors:
    """The forward operator on dense tensors, for ``T >= 1``. Must equal ``eager_scan``."""
    inputs, states, lifted = layout.split(flat_args)
    steps = inputs[0].shape[0]
    interval = 1 if not layout.final_state else layout.checkpoint_interval or steps
    outputs_by_step, kept_states = run_steps(core, inputs, states, lifted, layout.num_outputs, interval)
    outputs = stack_steps(outputs_by_step)
    if not layout.final_state:
        return (*outputs, *stack_steps(kept_states))
    final = tuple(_fresh(state) for state in kept_states[-1])
    return (*outputs, *final, *(stack_steps(kept_states) if layout.checkpoint_interval else ()))


def forward_shapes(core: StepFunction, layout: ScanLayout, flat_args: Sequence[Any]) -> Tensors:
    """Tensors like the forward operator's results, from one call of the core."""
    inputs, states, lifted = layout.split(flat_args)
    first = [sequence[:1] for sequence in inputs]
    (outputs,), (new_states,) = run_steps(core, first, states, lifted, layout.num_outputs, 1)
    steps = inputs[0].shape[0]

    def over_time(length: Any, value: torch.Tensor) -> torch.Tensor:
        return value.new_empty((length, *value.shape))

    results = [over_time(steps, output) for output in outputs]
    if not layout.final_state:
        return (*results, *(over_time(steps, state) for state in new_states))
    results += [state.new_empty(state.shape) for state in new_states]
    if layout.checkpoint_interval:
        segments = -(-steps // layout.checkpoint_interval)
        results += [over_time(segments, state) for state in new_states]
    return tuple(results)


def backward_samples(layout: BackwardLayout, args: Sequence[Any]) -> tuple[Any, ...]:
    """What the step's VJP takes: the step's values, output gradients, active state cotangents."""
    flat_args, _, output_grads, _ = layout.split(args)
    _, states, _ = layout.scan.split(flat_args)
    return (
        *forward_samples(layout.scan, flat_args),
        *(gradient.select(0, 0) for gradient in output_grads),
        *(torch.empty_like(state) for state, active in zip(states, layout.active_states, strict=True) if active),
    )


def backward_loop(core: StepFunction, vjp: StepFunction, layout: BackwardLayout, args: Sequence[Any]) -> Tensors:
    """The backward operator on dense tensors: walk back in time, segment by segment.

    The states within a segment are computed again from the one that it starts with.
    """
    flat_args, saved, output_grads, state_grads = layout.split(args)
    inputs, states, lifted = layout.scan.split(flat_args)
    steps = inputs[0].shape[0]
    inputs_by_step = list(zip(*(sequence.unbind(0) for sequence in inputs), strict=True))
    grads_by_step: Sequence[Tensors] = (
        list(zip(*(gradient.unbind(0) for gradient in output_grads), strict=True)) if output_grads else [()] * steps
    )
    added = _StateGradients(layout, states, state_grads, steps)
    cotangents = added.initial()
    input_grads: list[Tensors] = []
    lifted_grads: Tensors | None = None
    _, _, lifted_needs = layout.scan.split(layout.needs)
    num_carried, num_lifted = len(cotangents), sum(lifted_needs)
    for first, start in _segments_backwards(layout, states, saved, steps):
        last = min(first + layout.saved_interval, steps)
        befores = [start]
        for step in range(first, last - 1):
            values = step_values(
                core(*inputs_by_step[step], *befores[-1], *lifted),
                layout.scan.num_outputs,
                layout.scan.num_states,
            )
            befores.append(values[layout.scan.num_outputs :])
        for step in range(last - 1, first - 1, -1):
            gradients = tuple(
                vjp(
                    *inputs_by_step[step],
                    *befores[step - first],
                    *lifted,
                    *grads_by_step[step],
                    *added.at(step, cotangents),
                )
            )
            split = len(gradients) - num_carried - num_lifted
            input_grads.append(gradients[:split])
            cotangents = gradients[split : split + num_carried]
            step_lifted = gradients[split + num_carried :]
            lifted_grads = (
                step_lifted
                if lifted_grads is None
                else tuple(a + b for a, b in zip(lifted_grads, step_lifted, strict=True))
            )
    assert lifted_grads is not None  # the operators are never called with T == 0
    return (
        *stack_steps(input_grads[::-1]),
        *(_fresh(cotangents[i]) for i in _needed_carried(layout)),
        *(_fresh(gradient) for gradient in lifted_grads),
    )


def backward_shapes(vjp: StepFunction, layout: BackwardLayout, args: Sequence[Any], samples: Sequence[Any]) -> Tensors:
    """Tensors like the backward operator's results, from one call of the step's VJP."""
    steps = args[0].shape[0]
    gradients = tuple(vjp(*samples))
    num_inputs = sum(layout.needs[: layout.scan.num_inputs])
    num_carried = sum(layout.active_states)
    carried = gradients[num_inputs : num_inputs + num_carried]
    return (
        *(g.new_empty((steps, *g.shape)) for g in gradients[:num_inputs]),
        *(carried[i].new_empty(carried[i].shape) for i in _needed_carried(layout)),
        *(g.new_empty(g.shape) for g in gradients[num_inputs + num_carried :]),
    )


def _needed_carried(layout: BackwardLayout) -> list[int]:
    """Positions, among the active states, of those whose initial value needs a gradient."""
    _, needs, _ = layout.scan.split(layout.needs)
    flags = zip(needs, layout.active_states, strict=True)
    carried = [need for need, active in flags if active]
    return [index for index, need in enumerate(carried) if need]


def _segments_backwards(
    layout: BackwardLayout, states: Sequence[Any], saved: Sequence[Any], steps: int
) -> Iterator[tuple[int, Tensors]]:
    """First step and state before it, of each segment between saved states, from the last one."""
    saved_by_segment = list(zip(*(sequence.unbind(0) for sequence in saved), strict=True))
    for segment in range(-(-steps // layout.saved_interval) - 1, -1, -1):
        if not states:
            start: Tensors = ()
        else:
            start = tuple(states) if segment == 0 else saved_by_segment[segment - 1]
        yield segment * layout.saved_interval, start


class _StateGradients:
    """The gradients that came for the state results, by active state (None: none came)."""

    def __init__(self, layout: BackwardLayout, states: Sequence[Any], gradients: Sequence[Any], steps: int) -> None:
        came = iter(gradients)
        by_state = [next(came) if present else None for present in layout.state_grads]
        active = list(zip(states, by_state, layout.active_states, strict=True))
        self._final = layout.scan.final_state
        self._states = [state for state, _, is_active in active if is_active]
        self._gradients = [gradient for _, gradient, is_active in active if is_active]
        self._by_step = [
            None if gradient is None or self._final else gradient.unbind(0) for gradient in self._gradients
        ]

    def initial(self) -> Tensors:
        """Cotangents after the last step."""
        return tuple(
            gradient if self._final and gradient is not None else torch.zeros_like(state)
            for state, gradient in zip(self._states, self._gradients, strict=True)
        )

    def at(self, step: int, cotangents: Tensors) -> Tensors:
        """Cotangents of the states after ``step``: what was carried, and what came for it."""
        return tuple(
            carried if sequence is None else carried + sequence[step]
            for carried, sequence in zip(cotangents, self._by_step, strict=True)
        )


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: an operator's result shares memory with nothing."""
    return tensor.clone(memory_format=torch.contiguous_format)
