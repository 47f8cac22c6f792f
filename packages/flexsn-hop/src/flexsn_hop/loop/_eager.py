"""The reference: a plain Python loop over time, which PyTorch's autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from flexsn_hop._layout import ScanLayout
from flexsn_hop.errors import CoreReturnCountError, NotATensorError, OutputChangedError, StateChangedError
from flexsn_hop.formats import copy_in_order, sequence_order, split_steps, stack_in_order, state_order
from flexsn_hop.loop._arguments import OutputTemplateSpec, ScanCall, StepFunction, check_call, check_output_specs

__all__ = [
    "CoreSteps",
    "alike",
    "are_plain_and_of",
    "check_step",
    "contiguous_copy",
    "describe",
    "eager_scan",
    "eager_scan_final_state",
    "empty_scan",
    "kinds",
    "plain_scan",
    "run_steps",
    "stack_values",
    "state_copies",
    "step_values",
]

Tensors = tuple[torch.Tensor, ...]


def eager_scan(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs ``core_fn`` over time in a plain loop and stacks its outputs and states.

    Every kernel and every other form of the scan must give the same results as this function. The function and its
    backward take time that is linear in ``T``.

    Args:
        core_fn: The function of one time step, ``core(*inputs, *states, *lifted) -> (*outputs, *new_states)``.
            If the core returns a single value, the value need not be in a tuple.
        num_inputs: Number of input sequences, at least 1.
        num_states: Number of states carried over time.
        num_outputs: Number of outputs of one step.
        *flat_args: ``[*input_seqs, *init_states, *lifted]``. An input sequence is ``[T, *step]``.
            A state is ``[*step]`` and keeps its shape, dtype and device. At every step, the core
            receives the same lifted tensors after the states. All dtypes and devices that the core accepts
            are allowed.
        output_template_specs: One ``(shape, dtype)`` or ``(shape, dtype, device)`` per output,
            for one step. The default device is the device of the first input. This argument is only used if
            ``T == 0`` and ``num_outputs > 0``, and is then required.

    Returns:
        ``(*output_seqs, *state_seqs)``, each ``[T, *shape of one step]``. A state sequence contains
        the state after each step. For ``T == 0``, the core is not called and all sequences are empty. The
        sequences have the memory format that an elementwise function of the input sequences returns. If the input
        sequences do not determine the format, the states do. For example, channels-last inputs give channels-last
        outputs. A gradient has the format of its argument.

    Raises:
        ScanCountError: ``num_inputs`` is below 1, or another count is below 0 (a ``ValueError``).
        TooFewTensorsError: The call passes fewer than ``num_inputs + num_states`` tensors (a ``ValueError``).
        SequenceLengthError: Leading dimensions are unequal or missing (a ``ValueError``).
        CoreArityError: The core cannot take this number of arguments (a ``ValueError``).
        CoreReturnCountError: The core did not return ``num_outputs + num_states`` values (a ``ValueError``).
        StateChangedError: The shape, dtype or device of a state changed in a step (a ``ValueError``).
        OutputChangedError: The shape, dtype or device of an output differs between two steps (a ``ValueError``).
        EmptyScanError: ``T == 0``, and ``output_template_specs`` does not describe the outputs (a ``ValueError``).
        NotATensorError: An argument or a returned value is not a tensor (a ``TypeError``).

    Example:
        >>> import torch
        >>> from flexsn_hop import eager_scan
        >>> def integrate(x, v):
        ...     h = v + x
        ...     spike = (h >= 1).to(h)
        ...     return spike, h - spike
        >>> x = torch.full((3, 2), 0.5)
        >>> spikes, v = eager_scan(integrate, 1, 1, 1, x, torch.zeros(2))
        >>> spikes[:, 0]
        tensor([0., 1., 0.])
    """
    layout = ScanLayout(num_inputs, num_states, num_outputs)
    return _check_and_scan(ScanCall(core_fn, layout, flat_args, output_template_specs))


def eager_scan_final_state(
    core_fn: StepFunction,
    num_inputs: int,
    num_states: int,
    num_outputs: int,
    *flat_args: torch.Tensor,
    output_template_specs: Sequence[OutputTemplateSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs ``core_fn`` over time like :func:`eager_scan`, but returns only the last states.

    Arguments and errors are those of :func:`eager_scan`.

    Returns:
        ``(*output_seqs, *final_states)``: output sequences ``[T, *shape of one step]`` and states
        ``[*step]``. A final state never shares memory with an argument or another result. For
        ``T == 0``, the final states are clones of the initial states.

    Example:
        >>> import torch
        >>> from flexsn_hop import eager_scan_final_state
        >>> total, last = eager_scan_final_state(
        ...     lambda x, v: (x + v, x + v), 1, 1, 1, torch.ones(4, 2), torch.zeros(2)
        ... )
        >>> last
        tensor([4., 4.])
    """
    layout = ScanLayout(num_inputs, num_states, num_outputs, final_state=True)
    return _check_and_scan(ScanCall(core_fn, layout, flat_args, output_template_specs))


def _check_and_scan(call: ScanCall) -> tuple[torch.Tensor, ...]:
    check_call(call)
    return plain_scan(call)


def empty_scan(call: ScanCall) -> tuple[torch.Tensor, ...]:
    """Returns the results of a scan with ``T == 0``, without calling the core."""
    outputs = []
    for spec in check_output_specs(call.layout.num_outputs, call.output_template_specs):
        device = spec[2] if len(spec) == 3 and spec[2] is not None else call.flat_args[0].device
        outputs.append(torch.empty((0, *spec[0]), dtype=spec[1], device=device))
    inputs, states, _ = call.split()
    if call.layout.final_state:
        return (*outputs, *state_copies(inputs, states, states))
    return (*outputs, *[state.new_empty((0, *state.shape)) for state in states])


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of ``tensor``."""
    return tensor.clone(memory_format=torch.contiguous_format)


def state_copies(
    inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns copies of final states, in the memory format of the results."""
    return [copy_in_order(value, state_order(value.shape, inputs, states)) for value in values]


def stack_values(
    inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], by_step: Sequence[Tensors]
) -> list[torch.Tensor]:
    """Stacks T tuples of values into one tensor ``[T, *shape]`` for each value, in the memory format of the results."""
    return [
        stack_in_order(values, sequence_order(values[0].shape, inputs, states)) for values in zip(*by_step, strict=True)
    ]


def step_values(returned: object, num_outputs: int, num_states: int) -> tuple[torch.Tensor, ...]:
    """Returns the result of one call of the core, as a tuple of ``num_outputs + num_states`` tensors."""
    values = (returned,) if isinstance(returned, torch.Tensor) else returned
    if not isinstance(values, (tuple, list)):
        raise NotATensorError(
            f"the core returned a {type(values).__name__}; it must return a tensor or a tuple or "
            "list of tensors, (*outputs, *new_states)"
        )
    requested = num_outputs + num_states
    if len(values) != requested:
        raise CoreReturnCountError(
            f"the core returned {len(values)} values; num_outputs + num_states is {requested} "
            f"({num_outputs} + {num_states}): return (*outputs, *new_states)"
        )
    tensors = []
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            role = f"output {index}" if index < num_outputs else f"new state {index - num_outputs}"
            raise NotATensorError(f"the core returned a {type(value).__name__} as {role}; it must be a torch.Tensor")
        tensors.append(value)
    return tuple(tensors)


def check_step(
    returned: object, states: Sequence[torch.Tensor], num_outputs: int, step: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Checks and returns the outputs and new states of a step that started with ``states``."""
    values = step_values(returned, num_outputs, len(states))
    outputs, new_states = values[:num_outputs], values[num_outputs:]
    for index, (old, new) in enumerate(zip(states, new_states, strict=True)):
        if not alike(old, new):
            raise StateChangedError(
                f"state {index} was {describe(old)} before step {step} and "
                f"{describe(new)} after it; a state keeps its shape, dtype and device: "
                "expand or cast the initial state or the core's result"
            )
    return outputs, new_states


def plain_scan(call: ScanCall) -> tuple[torch.Tensor, ...]:
    """Runs the loop without checking the arguments, in code that Dynamo can trace step by step."""
    if call.steps == 0:
        return empty_scan(call)
    inputs, states, lifted = call.split()
    last = call.steps - 1
    kept_steps = range(last, last + 1) if call.layout.final_state else range(last + 1)
    take_step = CoreSteps(call.core, lifted, call.layout.num_outputs)
    outputs_by_step, states_after = run_steps(take_step, inputs, states, kept_steps)
    outputs = stack_values(inputs, states, outputs_by_step)
    if not call.layout.final_state:
        return (*outputs, *stack_values(inputs, states, list(states_after.values())))
    # A core may return a state unchanged. The copies ensure that results and arguments do not share memory.
    return (*outputs, *state_copies(inputs, states, states_after[last]))


class CoreSteps:
    """Calls a core step by step, and checks its results.

    Args:
        core_fn: ``core(*inputs, *states, *lifted) -> (*outputs, *new_states)``.
        lifted: Arguments of the core after the states, which are the same at every step.
        num_outputs: Number of outputs of one step.
    """

    def __init__(self, core_fn: StepFunction, lifted: Sequence[Any], num_outputs: int) -> None:
        self._core = core_fn
        self._lifted = lifted
        self._num_outputs = num_outputs
        self._first: Tensors | None = None
        self._kinds: list[Kind] = []

    def __call__(self, slices: Sequence[Any], states: Sequence[Any], step: int) -> tuple[Tensors, Tensors]:
        """Returns the outputs and new states of a step."""
        returned = self._core(*slices, *states, *self._lifted)
        if type(returned) is tuple and self._first is not None and are_plain_and_of(returned, self._kinds):
            return returned[: self._num_outputs], returned[self._num_outputs :]
        outputs, new_states = check_step(returned, states, self._num_outputs, step)
        if self._first is None:
            self._first = outputs
            self._kinds = kinds((*outputs, *new_states))
        for index, (first, current) in enumerate(zip(self._first, outputs, strict=True)):
            if not alike(first, current):
                raise OutputChangedError(
                    f"output {index} was {describe(first)} at step 0 and {describe(current)} "
                    f"at step {step}; an output keeps its shape, dtype and device"
                )
        return outputs, new_states


def run_steps(
    take_step: Callable[[Sequence[Any], Sequence[Any], int], tuple[Tensors, Tensors]],
    inputs: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    kept_steps: Container[int],
    *,
    backwards: bool = False,
    go_on: bool = False,
) -> tuple[list[Tensors], dict[int, Tensors]]:
    """Returns the outputs of every step, and the states after each step in ``kept_steps``.

    ``take_step(slices, states, step)`` returns a step's outputs and new states. Steps are counted in the order of
    the calls. If ``backwards`` is True, the first step takes the last slices. If ``go_on`` is True, ``states`` are the
    results of earlier steps, not initial states.
    """
    outputs_by_step: list[Tensors] = []
    states_after: dict[int, Tensors] = {}
    # unbind is used instead of x[t], because the backward of x[t] writes a gradient of the size of x for each t, which
    # takes O(T^2). The gradient of an initial state has the format of the state, because `split_steps` receives the
    # state as a sequence of one step.
    states = states if go_on else [_prepare_state(state) for state in states]
    slices_by_step = list(zip(*[split_steps(sequence) for sequence in inputs], strict=True))
    if backwards:
        slices_by_step.reverse()
    for step, slices in enumerate(slices_by_step):
        outputs, new_states = take_step(slices, states, step)
        outputs_by_step.append(outputs)
        if step in kept_steps:
            states_after[step] = new_states
        states = new_states
    return outputs_by_step, states_after


def _prepare_state(state: torch.Tensor) -> torch.Tensor:
    return split_steps(state.unsqueeze(0))[0] if state.requires_grad and state.layout is torch.strided else state


Kind = tuple[torch.Size, torch.dtype, torch.device]
"""The shape, dtype and device of a value, which are the same in all steps."""


def kinds(values: Sequence[torch.Tensor]) -> list[Kind]:
    """Returns the shape, dtype and device of each value, for comparisons with values of later steps."""
    return [(value.shape, value.dtype, value.device) for value in values]


def are_plain_and_of(values: Sequence[Any], expected: Sequence[Kind]) -> bool:
    """True if all values are plain tensors of these kinds. If False, the values may still pass `check_step`.

    This check takes most of the time that the loop adds to a step, so the check does not call a function for each
    value.
    """
    if len(values) != len(expected):
        return False
    for value, (shape, dtype, device) in zip(values, expected):  # noqa: B905 - lengths are equal, and `strict` is slow
        if type(value) is not torch.Tensor or value.is_nested:
            return False
        if value.dtype is not dtype or value.shape != shape or value.device != device:
            return False
    return True


def alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
