"""Checks the tensors of a call, and converts these tensors to the arguments of a scan. Each error names a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from flexsn_graph import StepValue
from flexsn_runtime._torch_private import transform_at_work
from flexsn_runtime.backend import target_on, why_unavailable
from flexsn_runtime.errors import (
    BackendUnavailableError,
    DeviceError,
    DtypeError,
    ShapeError,
    TensorCountError,
    TransformError,
)
from flexsn_runtime.operands._memory import check_tensors
from flexsn_runtime.operands._operands import Arguments, layout_key
from flexsn_runtime.program._autocast import autocast_now
from flexsn_runtime.program._program import PointwiseProgram, ScanProgram
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization


@overload
def prepare(
    program: PointwiseProgram,
    flat_args: Sequence[Tensor],
    *,
    autocast: bool = True,
    instead: Mapping[int, Tensor] | None = None,
) -> tuple[Specialization, Arguments]: ...
@overload
def prepare(
    program: ScanProgram,
    flat_args: Sequence[Tensor],
    *,
    autocast: bool = True,
    instead: Mapping[int, Tensor] | None = None,
) -> tuple[CoreSpecialization, Arguments]: ...
def prepare(
    program: ScanProgram,
    flat_args: Sequence[Tensor],
    *,
    autocast: bool = True,
    instead: Mapping[int, Tensor] | None = None,
) -> tuple[CoreSpecialization, Arguments]:
    """Checks the tensors `[*input_seqs, *init_states, *lifted]`, and specializes the step on them.

    All initial states are passed, or none of them. If none is passed, the initial states are zeros. All lifted tensors
    are passed, or none of them. If none is passed, the tensors that the core captures now are used. An input or a state
    is detached if the program's `requires_grad` excludes its gradient.

    Args:
        autocast: True to apply an active `torch.autocast` inside of the core, as in a loop.
        instead: replacements of captured tensors, by the `id` of the captured tensor. This call reads the replacement
            instead of the captured tensor. Both tensors have the same shape, strides and dtype.

    Raises:
        TypeError: an argument is not a tensor.
        LayoutError: an argument or a captured tensor is sparse, nested, quantized or fake, or has no memory.
        TensorCountError: the number of tensors differs from the number that the step takes.
        ShapeError: the leading dimensions of the inputs differ, an input has no dimensions, or the inputs of one step
            do not broadcast to one shape.
        DtypeError: kernels do not support the dtype of a state or a captured tensor.
        DtypeError, ShapeError: the dtype or shape of a lifted tensor differs from that of the captured tensor that it
            replaces.
        DeviceError: the tensors are on several devices.
        BackendUnavailableError: kernels cannot run on the device of the tensors.
        TransformError: the call is inside of a transform of `torch.func`, forward-mode differentiation, `make_fx` or a
            similar mode.
    """
    transform = transform_at_work()
    if transform is not None:
        raise TransformError(
            f"a compiled scan cannot run inside of {transform}. Use backend='torch' there, or backend='hop'."
        )
    try:
        autocast_dtype = autocast_now(flat_args[0].device) if autocast and flat_args else None
        layout = layout_key(flat_args)
    except (AttributeError, RuntimeError):
        check_tensors(flat_args)
        raise
    prepared = program.plans.get(("prepared", autocast_dtype, layout))
    if prepared is not None:
        step, first_lifted = prepared
        captured = step.captured(instead)
        if captured is not None:
            lifted = tuple(flat_args[first_lifted:]) or captured
            if captured and lifted is captured:
                check_tensors(lifted, "captured tensor")
            arguments = _build_arguments(program, program.masked(flat_args[:first_lifted]), lifted)
            at_zero = arguments.states[first_lifted - program.num_inputs :]
            key = (*layout[:first_lifted], *at_zero, *(layout[first_lifted:] or layout_key(lifted)))
            arguments = arguments._replace(layout=key)
            if step.trace.reads.derived:
                _set_derived(program, step, arguments.inputs, arguments.states)
            return step, arguments
    check_tensors(flat_args)
    inputs, states, lifted = split_flat(program, flat_args)
    first_lifted = len(flat_args) - len(lifted)
    check_sequences(inputs)
    check_device((*inputs, *(states or ())), program)
    step, captured = program.specialize(inputs, states, autocast=autocast)
    if len(lifted) not in (0, len(captured)):
        raise _make_count_error(program, flat_args, len(captured))
    if instead is not None:
        replaced = step.captured(instead)
        assert replaced is not None, "the captured tensors have just been read"
        captured = replaced
    if lifted:
        check_lifted(step, lifted)
    else:
        check_tensors(captured, "captured tensor")
    # Kernels read memory, which does not contain the sign of a lazily negated view.
    primals = program.masked([t.resolve_neg() for t in (*inputs, *(states or ()))])
    arguments = _build_arguments(program, primals, tuple(lifted or captured))
    if step.trace.reads.derived:
        _set_derived(program, step, arguments.inputs, arguments.states)
    if not any(t.is_neg() for t in flat_args):
        program.plans["prepared", autocast_dtype, layout] = step, first_lifted
    return step, arguments


def _build_arguments(program: ScanProgram, primals: tuple[Tensor, ...], lifted: tuple[Tensor, ...]) -> Arguments:
    """Combines `primals`, which are inputs with or without states, and lifted tensors into the arguments of a scan."""
    states = primals[program.num_inputs :] or (None,) * program.num_states
    return Arguments(primals[: program.num_inputs], states, lifted)


def _set_derived(
    program: ScanProgram, step: CoreSpecialization, inputs: Sequence[Tensor], states: Sequence[Tensor | None]
) -> None:
    """Sets the attributes that the core derives from captured tensors, as a loop would. Kernels set no attributes.

    To set the attributes, this function runs the core for one step. For example, the forward pre-hooks of
    `torch.nn.utils.prune` derive an attribute from two captured tensors.
    """
    if not inputs[0].shape[0]:
        return
    first_inputs = [x.detach()[0] for x in inputs]
    shape = torch.broadcast_shapes(*(x.shape for x in first_inputs))
    state_values = [
        first_inputs[0].new_zeros(shape, dtype=value.dtype) if state is None else state.detach()
        for state, value in zip(states, step.trace.states, strict=True)
    ]
    program.core(*first_inputs, *state_values)


def split_flat(
    program: ScanProgram, flat_args: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
    """Splits the tensors of a call into inputs, initial states and lifted tensors, depending on the number of tensors.

    The tensors after the inputs are the states, the lifted tensors, or both. If their number could mean either the
    states or the lifted tensors, these tensors are the states. The second result is `None` without initial states, and
    the third result is empty without lifted tensors.
    """
    inputs, rest = tuple(flat_args[: program.num_inputs]), tuple(flat_args[program.num_inputs :])
    num_states, num_lifted = program.num_states, program.num_lifted
    if len(inputs) < program.num_inputs:
        raise _make_count_error(program, flat_args, num_lifted)
    if num_states and len(rest) != num_states and len(rest) in (0, num_lifted):
        return inputs, None, rest
    if len(rest) < num_states or (num_lifted is not None and len(rest) - num_states not in (0, num_lifted)):
        raise _make_count_error(program, flat_args, num_lifted)
    return inputs, rest[:num_states], rest[num_states:]


def _make_count_error(program: ScanProgram, flat_args: Sequence[Tensor], num_lifted: int | None) -> TensorCountError:
    lifted = "its" if num_lifted is None else num_lifted
    return TensorCountError(
        f"got {len(flat_args)} tensors; the step takes {program.num_inputs} input sequences, "
        f"{program.num_states} initial states (all or none) and {lifted} captured tensors (all or none)."
    )


def check_lifted(step: CoreSpecialization, lifted: Sequence[Tensor]) -> None:
    """Raises an error unless each lifted tensor has the shape and dtype with which the step was traced."""
    for i, (tensor, value) in enumerate(zip(lifted, step.trace.lifted_values, strict=True)):
        received = StepValue.of(tensor)
        if received == value:
            continue
        kind = DtypeError if received.shape == value.shape else ShapeError
        raise kind(
            f"captured tensor {i} was passed as {received}; the core captures {value}. Pass the captured tensors in "
            "the order of `ScanProgram.lifted()`, or leave all of them out."
        )


def check_sequences(inputs: Sequence[Tensor]) -> None:
    """Raises `ShapeError` unless all sequences have the same leading dimension T."""
    for i, x in enumerate(inputs):
        if x.dim() == 0:
            raise ShapeError(f"input {i} has no dimensions; an input sequence is [T, *step].")
    lengths = [x.shape[0] for x in inputs]
    if len(set(lengths)) > 1:
        raise ShapeError(
            f"the input sequences have {', '.join(map(str, lengths))} time steps: their leading dimension T "
            "must be equal."
        )


def check_device(tensors: Sequence[Tensor], program: ScanProgram) -> None:
    """Raises an error unless a program's kernels can run on these tensors."""
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise DeviceError(f"the tensors are on {' and '.join(devices)}: move them to one device.")
    device = torch.device(devices[0])
    reason = why_unavailable(device, target_on(device, program.on_cpu))
    if reason is not None:
        raise BackendUnavailableError(f"compiled kernels cannot run: {reason}")
