"""Checks the tensors of a call, in words, and brings them into the form that a scan takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexsn_runtime._availability import why_unavailable
from flexsn_runtime._operands import Arguments, layout_key
from flexsn_runtime._program import ScanProgram, Specialization
from flexsn_runtime.errors import BackendUnavailableError, DeviceError, ShapeError, TensorCountError


def prepare(program: ScanProgram, flat_args: Sequence[Tensor]) -> tuple[Specialization, Arguments]:
    """Checks `[*input_seqs, *init_states, *lifted]` and specialises the step on them.

    Initial states may be left out, all of them: they start at zero. Lifted tensors may be left out, all of
    them: they are what the core captures now. Inputs and states whose gradient the program's `requires_grad`
    excludes come back detached.

    Raises:
        TypeError: an argument is no tensor.
        TensorCountError: another number of tensors than the step takes.
        ShapeError: the inputs' leading dimensions differ, or one has none, or the steps do not broadcast.
        DeviceError, BackendUnavailableError: kernels cannot run on these tensors.
    """
    check_tensors(flat_args)
    key = layout_key(flat_args)
    known = program.calls.get(key)
    if known is not None and (captured := known.captured()) is not None:
        states = flat_args[program.num_inputs :] or (None,) * program.num_states
        return known, _arguments(program, flat_args[: program.num_inputs], states, captured, key)
    inputs, given, lifted = split_flat(program, flat_args)
    check_sequences(inputs)
    check_device((*inputs, *(given or ())))
    step, captured = program.specialize(inputs, given)
    if len(lifted) not in (0, len(captured)):
        raise _count_error(program, flat_args, len(captured))
    # A kernel reads memory, which the negative bit of a lazily negated view is not in.
    states = (None,) * program.num_states if given is None else [v.resolve_neg() for v in given]
    arguments = _arguments(program, [x.resolve_neg() for x in inputs], states, lifted or captured)
    if not lifted and not any(t.is_neg() for t in flat_args):
        program.calls[key] = step
    return step, arguments


def _arguments(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor | None],
    lifted: Sequence[Tensor],
    key: tuple[object, ...] | None = None,
) -> Arguments:
    """`key`: that of inputs and states, if it is known."""
    if program.requires_grad is not None:
        allowed = iter(program.requires_grad)
        inputs = [x if next(allowed) else x.detach() for x in inputs]
        states = [v if next(allowed) or v is None else v.detach() for v in states]
    # Absent states are `None` in a key of all arguments, and not there in that of a call's.
    complete = None if key is None else (len(key), *key, *layout_key(lifted))
    return Arguments(tuple(inputs), tuple(states), tuple(lifted), complete)


def split_arguments(step: Specialization, tensors: Sequence[Tensor | None]) -> Arguments:
    """`[*inputs, *states, *lifted]`, with `None` for absent states, by role."""
    first_state = step.trace.num_inputs
    first_lifted = first_state + step.trace.num_states
    inputs, lifted = tensors[:first_state], tensors[first_lifted:]
    assert all(t is not None for t in (*inputs, *lifted))
    return Arguments(
        tuple(t for t in inputs if t is not None),
        tuple(tensors[first_state:first_lifted]),
        tuple(t for t in lifted if t is not None),
    )


def split_flat(
    program: ScanProgram, flat_args: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
    """Inputs, initial states (`None`: left out) and lifted tensors (empty: left out), told by their number.

    What follows the inputs is nothing, or the states, or the states and the lifted tensors, or the lifted
    tensors alone, unless there are as many of them as states.
    """
    inputs, rest = tuple(flat_args[: program.num_inputs]), tuple(flat_args[program.num_inputs :])
    num_states, num_lifted = program.num_states, program.num_lifted
    if len(inputs) < program.num_inputs:
        raise _count_error(program, flat_args, num_lifted)
    if num_states and len(rest) != num_states and len(rest) in (0, num_lifted):
        return inputs, None, rest
    if len(rest) < num_states or (num_lifted is not None and len(rest) - num_states not in (0, num_lifted)):
        raise _count_error(program, flat_args, num_lifted)
    return inputs, rest[:num_states], rest[num_states:]


def _count_error(
    program: ScanProgram, flat_args: Sequence[Tensor], num_lifted: int | None
) -> TensorCountError:
    lifted = "its" if num_lifted is None else num_lifted
    return TensorCountError(
        f"got {len(flat_args)} tensors; the step takes {program.num_inputs} input sequences, "
        f"{program.num_states} initial states (all or none) and {lifted} captured tensors (all or none)."
    )


def check_tensors(tensors: Sequence[object]) -> None:
    """Raises `TypeError` unless all are tensors."""
    for i, value in enumerate(tensors):
        if not isinstance(value, Tensor):
            raise TypeError(f"argument {i} is a {type(value).__name__}; a scan takes tensors.")


def check_sequences(inputs: Sequence[Tensor]) -> None:
    """Raises `ShapeError` unless all have one leading dimension T."""
    for i, x in enumerate(inputs):
        if x.dim() == 0:
            raise ShapeError(f"input {i} has no dimensions; an input sequence is [T, *step].")
    lengths = [x.shape[0] for x in inputs]
    if len(set(lengths)) > 1:
        raise ShapeError(
            f"the input sequences have {', '.join(map(str, lengths))} time steps: their leading dimension T "
            "must be equal."
        )


def check_device(tensors: Sequence[Tensor]) -> None:
    """Raises unless kernels can run on these tensors."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise DeviceError(f"the tensors are on {' and '.join(devices)}: move them to one device.")
    why = why_unavailable(torch.device(devices[0]))
    if why is not None:
        raise BackendUnavailableError(f"compiled kernels cannot run: {why}")
