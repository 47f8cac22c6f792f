"""The arguments of a call of a scan, which are the same for all forms of the scan, and checks of the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsn_hop._layout import ScanLayout
from flexsn_hop.errors import (
    CoreArityError,
    EmptyScanError,
    NonzeroStateError,
    NotATensorError,
    ScanCountError,
    SequenceLengthError,
    TooFewTensorsError,
)

__all__ = [
    "OutputTemplateSpec",
    "ScanCall",
    "StepFunction",
    "check_call",
    "check_output_specs",
    "check_zero_states",
    "positional_range",
]

StepFunction = Callable[..., Any]
"""The function of one time step: ``core(*inputs, *states, *lifted) -> (*outputs, *new_states)``."""

OutputTemplateSpec = tuple[Sequence[int], torch.dtype] | tuple[Sequence[int], torch.dtype, torch.device | str | None]
"""Description of one step of an output: ``(shape, dtype)`` or ``(shape, dtype, device)``."""


@dataclass(frozen=True, slots=True)
class ScanCall:
    """The arguments of a call of a scan. All forms of the scan take this record.

    If another form replaces the operator, Dynamo traces the code that uses the record.

    Attributes:
        core: The function of one time step.
        layout: The numbers of inputs, states and outputs, and options of the scan. ``final_state`` is True to return
            the last states instead of the state sequences.
        flat_args: ``[*input_seqs, *init_states, *lifted]``. Lifted values are tensors. If the core was captured with
            symbolic shapes, some lifted values may be sizes.
        output_template_specs: Description of the outputs for ``T == 0``.
    """

    core: StepFunction
    layout: ScanLayout
    flat_args: Sequence[Any]
    output_template_specs: Sequence[OutputTemplateSpec] | None = None

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        steps: int = self.flat_args[0].shape[0]
        return steps

    def split(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Splits the arguments into input sequences, initial states and lifted values."""
        return self.layout.split(self.flat_args)


def _check_counts(num_inputs: int, num_states: int, num_outputs: int) -> None:
    """Raises an error if no scan can have these numbers of inputs, states and outputs."""
    for name, value in (("num_inputs", num_inputs), ("num_states", num_states), ("num_outputs", num_outputs)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ScanCountError(f"{name} is {value!r}; it must be an int")
    if num_inputs < 1:
        raise ScanCountError(
            f"num_inputs is {num_inputs}; a scan needs at least 1 input sequence: "
            "its leading dimension is the number of steps"
        )
    for name, value in (("num_states", num_states), ("num_outputs", num_outputs)):
        if value < 0:
            raise ScanCountError(f"{name} is {value}; it must be at least 0")


def positional_range(core_fn: StepFunction) -> tuple[int, int | None, list[str]] | None:
    """Returns the minimum and maximum number of positional arguments, and the required keyword-only arguments.

    The maximum is None if any number of arguments is possible. The result is None if the signature is unknown, for
    example for many builtins. In that case, only a call of the function can raise an error.
    """
    target = core_fn.forward if isinstance(core_fn, torch.nn.Module) else core_fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    fewest = 0
    most: int | None = 0
    keywords = []
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            most = None
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if required:
                keywords.append(parameter.name)
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            fewest += required
            most = None if most is None else most + 1
    return fewest, most, keywords


def _check_arity(core_fn: StepFunction, num_inputs: int, num_states: int, num_lifted: int) -> None:
    """Raises an error if a core cannot be called with one value for each input, state and lifted tensor."""
    if not callable(core_fn):
        raise TypeError(f"core_fn is a {type(core_fn).__name__}; it must be callable")
    accepted = positional_range(core_fn)
    if accepted is None:
        return
    fewest, most, keywords = accepted
    num_arguments = num_inputs + num_states + num_lifted
    called_with = f"it is called with {num_arguments} ({num_inputs} inputs + {num_states} states + {num_lifted} lifted)"
    if keywords:
        raise CoreArityError(
            f"the core has required keyword-only parameters ({', '.join(keywords)}), but "
            f"{called_with}, all positional: make them positional or bind them"
        )
    if num_arguments < fewest or (most is not None and num_arguments > most):
        takes = f"{fewest}" if most == fewest else f"{fewest} to {'any number' if most is None else most}"
        raise CoreArityError(
            f"the core takes {takes} positional arguments; {called_with}: change the core's parameters or the counts"
        )


def check_call(call: ScanCall, *, captured: bool = False) -> None:
    """Checks the arguments of a call, as far as possible without calling the core.

    ``captured`` is True if the core is a graph, whose lifted values may also be sizes.

    Raises:
        ScanCountError, TooFewTensorsError, NotATensorError, SequenceLengthError, CoreArityError.
    """
    num_inputs, num_states, num_outputs = call.layout.counts
    _check_counts(num_inputs, num_states, num_outputs)
    if call.layout.zero_states and len(call.layout.zero_states) != num_states:
        raise ScanCountError(
            f"zero_states has {len(call.layout.zero_states)} entries and num_states is {num_states}: "
            "pass one entry for each state, or no entries"
        )
    requested = num_inputs + num_states
    if len(call.flat_args) < requested:
        raise TooFewTensorsError(
            f"the call has {len(call.flat_args)} tensors; num_inputs + num_states is {requested} "
            f"({num_inputs} + {num_states}): pass every input sequence and every initial state"
        )
    for index, value in enumerate(call.flat_args):
        if captured and index >= requested and isinstance(value, (int, torch.SymInt)):
            continue
        if not isinstance(value, torch.Tensor):
            raise NotATensorError(
                f"flat argument {index} is a {type(value).__name__}; every flat argument must be a torch.Tensor"
            )
    inputs, _, lifted = call.split()
    for index, sequence in enumerate(inputs):
        if sequence.dim() == 0:
            raise SequenceLengthError(f"input {index} has 0 dimensions; an input sequence needs at least 1, [T, *step]")
    for index, sequence in enumerate(inputs):
        if sequence.shape[0] != call.steps:
            raise SequenceLengthError(
                f"input 0 has {call.steps} steps and input {index} has {sequence.shape[0]}: "
                "all input sequences must have the same leading dimension"
            )
    _check_arity(call.core, num_inputs, num_states, len(lifted))


def check_zero_states(call: ScanCall) -> None:
    """Checks that the states in ``zero_states`` are zeros, since a compiled scan does not read these states.

    Raises:
        NonzeroStateError: A state is not zeros.
    """
    for position in call.layout.zero_positions:
        if call.flat_args[position].any():
            raise NonzeroStateError(
                f"state {position - call.layout.num_inputs} is not zeros, but zero_states is True for it: "
                "a compiled scan would start at zeros. Make this entry of zero_states False"
            )


def check_output_specs(
    num_outputs: int, output_template_specs: Sequence[OutputTemplateSpec] | None
) -> tuple[OutputTemplateSpec, ...]:
    """Returns the specs of the outputs of an empty scan, one for each output.

    Raises:
        EmptyScanError: The number of specs differs from the number of outputs, or a spec is neither
            ``(shape, dtype)`` nor ``(shape, dtype, device)``.
    """
    specs = () if output_template_specs is None else tuple(output_template_specs)
    if len(specs) != num_outputs:
        received = (
            "no output_template_specs" if output_template_specs is None else f"{len(specs)} output_template_specs"
        )
        raise EmptyScanError(
            f"the scan is empty (T == 0) and num_outputs is {num_outputs}, but the call has {received}: pass "
            f"output_template_specs with {num_outputs} entries (shape, dtype) or "
            "(shape, dtype, device), one per output, without the time dimension"
        )
    for index, spec in enumerate(specs):
        if (
            not isinstance(spec, (tuple, list))
            or len(spec) not in (2, 3)
            or not isinstance(spec[0], (tuple, list))
            or not isinstance(spec[1], torch.dtype)
        ):
            raise EmptyScanError(
                f"output_template_specs[{index}] is {spec!r}; it must be (shape, dtype) or (shape, dtype, device)"
            )
    return specs
