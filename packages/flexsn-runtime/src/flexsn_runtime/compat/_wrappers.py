"""Functions that run the kernels on tensors, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexsn_graph import FlexSNInfo
from flexsn_runtime.compat._kernels import ScanKernel
from flexsn_runtime.errors import TemplateNeededError, TensorCountError
from flexsn_runtime.kernels._backward import split_cotangents
from flexsn_runtime.kernels._scan import run_backward, run_forward
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.program._arguments import check_lifted, prepare
from flexsn_runtime.program._program import PointwiseProgram

# Name of an attribute of a checkpoint, whose value is the step that wrote the checkpoint.
_STEP_ATTRIBUTE = "_flexsn_step"


def flexsn_inference(f: ScanKernel, info: FlexSNInfo, *args: Tensor) -> tuple[Tensor, ...]:
    """Scans forward: `[*input_seqs, *init_states, *lifted] -> (*output_seqs, *state_seqs)`.

    If initial states are omitted, they are zeros. If lifted tensors are omitted, they are the tensors that the core
    captures at the time of the call. If `T == 0`, the sequences are empty.
    """
    step, arguments = prepare(f.program, args, autocast=False)
    result = run_forward(step, arguments, state_seqs=True, training=False)
    return (*result.outputs, *result.state_seqs)


def flexsn_inference_final_state(f: ScanKernel, info: FlexSNInfo, *args: Tensor) -> tuple[Tensor, ...]:
    """Scans forward: `[*input_seqs, *init_states, *lifted] -> (*output_seqs, *final_states)`.

    If `T == 0`, the outputs are empty, and the final states are copies of the initial states. If the initial
    states are omitted, the final states are zeros.
    """
    step, arguments = prepare(f.program, args, autocast=False)
    result = run_forward(step, arguments, state_seqs=False, training=False)
    return (*result.outputs, *result.final_states)


def flexsn_forward(f: ScanKernel, info: FlexSNInfo, *args: Tensor) -> tuple[Tensor, ...]:
    """Scans forward and saves the tensors that the backward needs.

    Returns:
        `(*output_seqs, *state_seqs, *saved)`. `saved` contains the arguments and the checkpoints, which
        `flexsn_backward` takes.
    """
    step, arguments = prepare(f.program, args, autocast=False)
    result = run_forward(step, arguments, state_seqs=True, training=True)
    f.program.will_be_differentiated(step)
    for checkpoint in result.checkpoints:
        setattr(checkpoint, _STEP_ATTRIBUTE, step)
    states = [t for t in arguments.states if t is not None]
    saved = (*arguments.inputs, *states, *arguments.lifted, *result.checkpoints)
    return (*result.outputs, *result.state_seqs, *saved)


def flexsn_backward(
    f: ScanKernel,
    info: FlexSNInfo,
    *args: Tensor | None,
    input_templates: Sequence[Tensor] | None = None,
    state_templates: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Scans backward: `(*grad_output_seqs, *grad_state_seqs, *saved) -> (*gradients)`.

    Args:
        args: gradients, then `saved` from `flexsn_forward`. A gradient that is `None` stands for zeros.
        input_templates, state_templates: tensors shaped like the inputs and initial states, for calls without `saved`.
            Such a call is possible only if every gradient is `None` or `T == 0`. Without templates, the inputs are
            assumed to have the shape of a gradient, and the states to have this shape without the dimension T.

    Returns:
        The gradients of `[*input_seqs, *init_states, *lifted]`.

    Raises:
        TemplateNeededError: the shape of a gradient is unknown.
    """
    program = f.program
    num_grads = program.num_outputs + program.num_states
    if len(args) < num_grads:
        raise TensorCountError(
            f"got {len(args)} arguments; the gradients of {program.num_outputs} output and "
            f"{program.num_states} state sequences come first ({num_grads} arguments; None for an absent gradient)."
        )
    grads, saved = args[:num_grads], [t for t in args[num_grads:] if t is not None]
    if not saved:
        return _compute_empty_gradients(program, grads, input_templates, state_templates)
    lifted = program.num_lifted or 0
    without_states = program.num_inputs + lifted + program.num_states
    if len(saved) not in (without_states, without_states + program.num_states):
        raise TensorCountError(
            f"{len(saved)} tensors follow the gradients; flexsn_forward saved {program.num_inputs} inputs, "
            f"{program.num_states} states (or none), {lifted} captured tensors and {program.num_states} "
            "checkpoints: pass all tensors that flexsn_forward returned after the state sequences."
        )
    primals, checkpoints = _split_last(saved, program.num_states)
    tensors, captured = _split_last(primals, lifted)
    step, arguments = prepare(program, tensors, autocast=False)
    writing_step = next((getattr(checkpoint, _STEP_ATTRIBUTE, None) for checkpoint in checkpoints), None)
    if writing_step is None:
        program.check_differentiated(step)
    else:
        writing_step.check_unchanged()
    check_lifted(step, captured)
    gradients = run_backward(
        step,
        Arguments(arguments.inputs, arguments.states, captured),
        checkpoints,
        split_cotangents(grads, program.num_outputs, state_seqs=True),
        _find_needed_gradients(program, arguments.inputs, arguments.states, captured),
    )
    return tuple(gradients)


def _split_last(tensors: Sequence[Tensor], count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    first = len(tensors) - count
    return tuple(tensors[:first]), tuple(tensors[first:])


def _find_needed_gradients(
    program: PointwiseProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor | None],
    lifted: Sequence[Tensor],
) -> list[bool]:
    """Returns True for each tensor that has a gradient.

    These are the floating-point tensors that `program.requires_grad` does not exclude.
    """
    tensors = (*inputs, *states, *lifted)
    mask = program.requires_grad or (True,) * (len(inputs) + len(states))
    return [
        t is not None and t.is_floating_point() and is_allowed
        for t, is_allowed in zip(tensors, (*mask, *(True,) * len(lifted)), strict=True)
    ]


def _compute_empty_gradients(
    program: PointwiseProgram,
    grads: Sequence[Tensor | None],
    input_templates: Sequence[Tensor] | None,
    state_templates: Sequence[Tensor] | None,
) -> tuple[Tensor | None, ...]:
    if any(g is not None and g.numel() for g in grads):
        raise TensorCountError(
            "got gradients, but no saved tensors: pass the tensors that flexsn_forward returned after the "
            "state sequences."
        )
    empty = next((g for g in grads if g is not None), None)
    state = next((g for g in grads[program.num_outputs :] if g is not None), empty)
    inputs = _choose_templates("input", input_templates, program.num_inputs, empty)
    states = _choose_templates(
        "state", state_templates, program.num_states, None if state is None else _allocate_step(state)
    )
    lifted = program.lifted()
    needs_grad = _find_needed_gradients(program, inputs, states, lifted)
    return tuple(
        t.new_zeros(t.shape) if is_needed else None
        for t, is_needed in zip((*inputs, *states, *lifted), needs_grad, strict=True)
    )


def _allocate_step(sequence: Tensor) -> Tensor:
    return sequence.new_empty(sequence.shape[1:])


def _choose_templates(
    role: str, templates: Sequence[Tensor] | None, count: int, like: Tensor | None
) -> Sequence[Tensor]:
    """Returns one tensor for each gradient, with its shape: the templates, or `like` if no templates are passed."""
    if templates is None and like is not None:
        return [like] * count
    if templates is None and count:
        raise TemplateNeededError(
            f"every gradient is None and nothing was saved, so the {role}s' shapes are unknown: pass {role}_templates."
        )
    tensors = templates or ()
    if len(tensors) != count:
        raise TensorCountError(f"{role}_templates has {len(tensors)} tensors; the step takes {count} {role}s.")
    return tensors
