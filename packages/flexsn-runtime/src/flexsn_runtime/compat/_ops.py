"""The scans as custom ops, for compilers: `(handle, flat_args) -> results`, with fake tensors and autograd.

`flat_args` is `[*input_seqs, *init_states, *lifted]`. Either all initial states are passed, or none
of them. If none is passed, the initial states are zeros.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from flexsn_graph import StepValue
from flexsn_runtime._saved import saved_of
from flexsn_runtime.compat._handles import (
    get_flexsn_kernel_handle,
    release_active_flexsn_kernel_handle,
    retain_flexsn_kernel_handle,
)
from flexsn_runtime.compat._kernels import ScanKernel
from flexsn_runtime.errors import TensorCountError, UnknownHandleError
from flexsn_runtime.kernels._backward import split_cotangents
from flexsn_runtime.kernels._forward import checkpoint_rows
from flexsn_runtime.kernels._refused import refuse_double_backward
from flexsn_runtime.kernels._scan import run_backward, run_forward
from flexsn_runtime.kernels._trained import not_differentiable
from flexsn_runtime.operands._order import ScanFormat, strides_like
from flexsn_runtime.program._arguments import prepare, split_flat
from flexsn_runtime.step._pointwise_step import Specialization

# A compiler treats sizes of 0 and 1 differently from all other sizes. The number of rows of checkpoints depends on T
# and can be 0, 1 or more. With two additional elements, the size of a flat tensor of checkpoints is never 0 or 1.
_PADDING = 2


def _run_inference(kernel: ScanKernel, flat_args: Sequence[Tensor], *, state_seqs: bool) -> list[Tensor]:
    step, arguments = prepare(kernel.program, flat_args, autocast=False)
    result = run_forward(step, arguments, state_seqs=state_seqs, training=False)
    return [*result.outputs, *result.state_seqs, *result.final_states]


def _run_training(kernel: ScanKernel, flat_args: Sequence[Tensor], *, state_seqs: bool) -> list[Tensor]:
    step, arguments = prepare(kernel.program, flat_args, autocast=False)
    _, _, lifted = split_flat(kernel.program, flat_args)
    num_missing = sum(t.requires_grad for t in arguments.lifted) if not lifted else 0
    if num_missing:
        raise TensorCountError(
            f"the core captures {num_missing} tensors that require grad, whose gradients an operator can compute "
            "only if they are its arguments: pass the captured tensors after the initial states."
        )
    result = run_forward(step, arguments, state_seqs=state_seqs, training=True, padding=_PADDING)
    kernel.program.will_be_differentiated(step)
    for checkpoint in result.checkpoints:
        checkpoint[-_PADDING:].zero_()  # so that every run returns equal results
    return [*result.outputs, *result.state_seqs, *result.final_states, *result.checkpoints]


def _allocate_results(
    kernel: ScanKernel, flat_args: Sequence[Tensor], *, state_seqs: bool, checkpoints: bool
) -> list[Tensor]:
    """Returns tensors with the shapes, strides and dtypes of the results. Sizes may be symbols."""
    inputs, states, _ = split_flat(kernel.program, flat_args)
    step = _specialize(kernel, inputs, states)
    num_steps = inputs[0].shape[0]
    shape = torch.broadcast_shapes(*(x.shape[1:] for x in inputs), *(v.shape for v in states or ()))

    form = ScanFormat.of(shape, inputs, states or (), guarded=True)
    sequence = (num_steps, *shape)

    def allocate(values: Sequence[StepValue], sizes: Sequence[int], strides: Sequence[int]) -> list[Tensor]:
        return [inputs[0].new_empty_strided(sizes, strides, dtype=v.dtype) for v in values]

    results = allocate(step.trace.outputs, sequence, form.sequence)
    results += allocate(step.trace.states, *((sequence, form.sequence) if state_seqs else (shape, form.step)))
    if checkpoints:
        ncl = math.prod(shape)
        size = checkpoint_rows(num_steps, step.plan(ncl).backward.chunk) * ncl + _PADDING
        results += [inputs[0].new_empty((size,), dtype=v.dtype) for v in step.trace.states]
    return results


def _specialize(kernel: ScanKernel, inputs: Sequence[Tensor], states: Sequence[Tensor] | None) -> Specialization:
    return kernel.program.specialize_like(
        [x.dtype for x in inputs], None if states is None else [v.dtype for v in states]
    )


def _find_inference_kernel(handle: int, *, state_seqs: bool) -> ScanKernel:
    bundle = get_flexsn_kernel_handle(handle)
    kernel = bundle.inference_kernel if state_seqs else bundle.inference_final_state_kernel
    return _require(kernel, handle, "inference")


def _find_training_kernel(handle: int) -> ScanKernel:
    return _require(get_flexsn_kernel_handle(handle).forward_kernel, handle, "training")


def _require(kernel: ScanKernel | None, handle: int, purpose: str) -> ScanKernel:
    if kernel is None:
        raise UnknownHandleError(f"handle {handle} was registered without a kernel for {purpose}.")
    return kernel


@torch.library.custom_op("flexsn::flexsn_inductor_inference", mutates_args=())
def flexsn_inductor_inference(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(*output_seqs, *state_seqs)`, without gradients."""
    return _run_inference(_find_inference_kernel(handle, state_seqs=True), flat_args, state_seqs=True)


@flexsn_inductor_inference.register_fake
def _(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel = _find_inference_kernel(handle, state_seqs=True)
    return _allocate_results(kernel, flat_args, state_seqs=True, checkpoints=False)


@torch.library.custom_op("flexsn::flexsn_inductor_inference_final_state", mutates_args=())
def flexsn_inductor_inference_final_state(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(*output_seqs, *final_states)`, without gradients."""
    return _run_inference(_find_inference_kernel(handle, state_seqs=False), flat_args, state_seqs=False)


@flexsn_inductor_inference_final_state.register_fake
def _(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel = _find_inference_kernel(handle, state_seqs=False)
    return _allocate_results(kernel, flat_args, state_seqs=False, checkpoints=False)


@torch.library.custom_op("flexsn::flexsn_inductor_training", mutates_args=())
def flexsn_inductor_training(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(*output_seqs, *state_seqs, *checkpoints)`, differentiable."""
    return _run_training(_find_training_kernel(handle), flat_args, state_seqs=True)


@flexsn_inductor_training.register_fake
def _(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    return _allocate_results(_find_training_kernel(handle), flat_args, state_seqs=True, checkpoints=True)


@torch.library.custom_op("flexsn::flexsn_inductor_training_final_state", mutates_args=())
def flexsn_inductor_training_final_state(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(*output_seqs, *final_states, *checkpoints)`, differentiable."""
    return _run_training(_find_training_kernel(handle), flat_args, state_seqs=False)


@flexsn_inductor_training_final_state.register_fake
def _(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    return _allocate_results(_find_training_kernel(handle), flat_args, state_seqs=False, checkpoints=True)


# `Optional` is required, because torch derives the schema from the annotations at run time.
@torch.library.custom_op("flexsn::flexsn_inductor_backward", mutates_args=())
def flexsn_inductor_backward(
    handle: int,
    flat_args: Sequence[Optional[Tensor]],  # noqa: UP045
    wanted: Sequence[bool],
    state_seqs: bool = True,
) -> list[Tensor]:
    """Returns the gradients, one for each true entry of `wanted`.

    `flat_args` is `[*grad_outputs, *grad_states, *flat_args of the forward, *checkpoints]`. A gradient that is `None`
    stands for zeros. `wanted` has an element for each element of `flat_args` of the forward.
    """
    program = _find_training_kernel(handle).program
    grads, flat, checkpoints = _split_backward(handle, flat_args, len(wanted))
    step, arguments = prepare(program, flat, autocast=False)
    program.check_differentiated(step)
    num_absent_states = sum(state is None for state in arguments.states)
    num_inputs = program.num_inputs
    all_needs = [*wanted[:num_inputs], *(False,) * num_absent_states, *wanted[num_inputs:]]
    all_needs += [False] * (num_inputs + program.num_states + len(arguments.lifted) - len(all_needs))
    cotangents = split_cotangents(grads, program.num_outputs, state_seqs=state_seqs)
    gradients = run_backward(step, arguments, checkpoints, cotangents, all_needs)
    return [g for g in gradients if g is not None]


@flexsn_inductor_backward.register_fake
def _(
    handle: int,
    flat_args: Sequence[Optional[Tensor]],  # noqa: UP045
    wanted: Sequence[bool],
    state_seqs: bool = True,
) -> list[Tensor]:
    _, flat, _ = _split_backward(handle, flat_args, len(wanted))
    return [
        t.new_empty_strided(t.shape, strides_like(t, guarded=True))
        for t, is_needed in zip(flat, wanted, strict=True)
        if is_needed
    ]


def _split_backward(
    handle: int, flat_args: Sequence[Tensor | None], num_forward: int
) -> tuple[Sequence[Tensor | None], list[Tensor], tuple[Tensor, ...]]:
    program = _find_training_kernel(handle).program
    num_grads = program.num_outputs + program.num_states
    rest = [t for t in flat_args[num_grads:] if t is not None]
    return flat_args[:num_grads], rest[:num_forward], tuple(rest[num_forward:])


class _Keeper:
    """Keeps a handle alive as long as a saved autograd context exists."""

    def __init__(self, handle: int) -> None:
        retain_flexsn_kernel_handle(handle)
        weakref.finalize(self, release_active_flexsn_kernel_handle, handle)


def _setup(ctx: Any, inputs: tuple[int, list[Tensor]], output: list[Tensor], *, state_seqs: bool) -> None:
    handle, flat_args = inputs
    kernel = _find_training_kernel(handle)
    program = kernel.program
    num_results = program.num_outputs + program.num_states
    sequences, states, lifted = split_flat(program, flat_args)
    ctx.step = step = _specialize(kernel, sequences, states)
    mask = program.requires_grad or (True,) * (program.num_inputs + program.num_states)
    ctx.allowed = (*mask[: len(flat_args) - len(lifted)], *(True,) * len(lifted))
    needs_grad = [t.requires_grad for t in flat_args]  # without the mask, which autograd does not know
    num_steps = sequences[0].shape[0]
    not_trained = not_differentiable(
        step,
        output[:num_results],
        needs_grad,
        num_steps if isinstance(num_steps, int) else None,
        state_seqs=state_seqs,
    )
    ctx.mark_non_differentiable(*not_trained, *output[num_results:])
    ctx.save_for_backward(*flat_args, *output[num_results:])
    ctx.handle, ctx.num_results = handle, num_results
    ctx.keeper = _Keeper(handle)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None], *, state_seqs: bool) -> tuple[None, list[Any]]:
    ctx.step.check_unchanged()
    needs_grad = [
        is_needed and is_allowed for is_needed, is_allowed in zip(ctx.needs_input_grad[1], ctx.allowed, strict=True)
    ]
    tensors = [*grads[: ctx.num_results], *saved_of(ctx)]
    with torch.no_grad():
        gradients = flexsn_inductor_backward(ctx.handle, tensors, needs_grad, state_seqs)
    if torch.is_grad_enabled():  # `create_graph`
        gradients = refuse_double_backward(gradients, tensors)
    remaining = iter(gradients)
    return None, [next(remaining) if is_needed else None for is_needed in needs_grad]


def _backward_state_seqs(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Any]]:
    return _backward(ctx, grads, state_seqs=True)


def _backward_final_state(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Any]]:
    return _backward(ctx, grads, state_seqs=False)


def _setup_state_seqs(ctx: Any, inputs: tuple[int, list[Tensor]], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output, state_seqs=True)


def _setup_final_state(ctx: Any, inputs: tuple[int, list[Tensor]], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output, state_seqs=False)


flexsn_inductor_training.register_autograd(_backward_state_seqs, setup_context=_setup_state_seqs)
flexsn_inductor_training_final_state.register_autograd(_backward_final_state, setup_context=_setup_final_state)

__all__ = [
    "flexsn_inductor_backward",
    "flexsn_inductor_inference",
    "flexsn_inductor_inference_final_state",
    "flexsn_inductor_training",
    "flexsn_inductor_training_final_state",
]
