"""Runs a specialised step over time: chooses the kernel, allocates what it writes, launches it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn_codegen import DENSE, BackwardSpec, ForwardSpec, InputLayout, Param, Role
from flexsn_graph import LiftedLayout, StepValue
from flexsn_runtime._launch import launch
from flexsn_runtime._layout import Terms, broadcast_strides, step_terms
from flexsn_runtime._program import Specialization


@dataclass(frozen=True, slots=True)
class Arguments:
    """The tensors of one scan.

    Attributes:
        inputs: `[T, *step]` each, or what broadcasts to it behind T.
        states: initial states `[*step]`; `None` starts at zero.
        lifted: captured tensors, of any shape.
    """

    inputs: tuple[Tensor, ...]
    states: tuple[Tensor | None, ...]
    lifted: tuple[Tensor, ...]

    @property
    def num_steps(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward scan wrote. `state_seqs` or `final_states` is empty, as asked for."""

    outputs: tuple[Tensor, ...]
    state_seqs: tuple[Tensor, ...]
    final_states: tuple[Tensor, ...]
    checkpoints: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Cotangents:
    """Incoming gradients; `None` is zero. `state_seqs` are `[T, *step]`, `final_states` `[*step]`."""

    outputs: tuple[Tensor | None, ...]
    state_seqs: tuple[Tensor | None, ...]
    final_states: tuple[Tensor | None, ...]


def run_forward(
    step: Specialization, arguments: Arguments, *, state_seqs: bool, checkpoints: bool
) -> ForwardResult:
    """Scans forward.

    Args:
        state_seqs: write the states after every step; otherwise the final ones alone.
        checkpoints: write what the backward recomputes from.
    """
    trace, num_steps, device = step.trace, arguments.num_steps, arguments.device
    shape = trace.step_shape
    empty = num_steps == 0 or 0 in shape
    plan = step.plan(math.prod(shape))
    config = plan.forward if checkpoints else plan.inference

    def allocate(values: Sequence[StepValue], *lead: int) -> tuple[Tensor, ...]:
        return tuple(torch.empty((*lead, *shape), dtype=v.dtype, device=device) for v in values)

    rows = checkpoint_rows(num_steps, plan.backward.chunk) if checkpoints else 0
    result = ForwardResult(
        outputs=allocate(trace.outputs, num_steps),
        state_seqs=allocate(trace.states, num_steps) if state_seqs else (),
        final_states=() if state_seqs else allocate(trace.states),
        checkpoints=allocate(trace.states, rows) if checkpoints else (),
    )
    if empty:
        for final, initial in zip(result.final_states, arguments.states, strict=False):
            final.zero_() if initial is None else final.copy_(initial)
        return result
    operands = _Operands(step, arguments, trace.forward.layouts)
    num_states = len(trace.states)
    spec = ForwardSpec(
        inputs=operands.inputs,
        states=operands.states,
        state_dtypes=step.state_dtypes,
        lifted=operands.lifted,
        outputs=(True,) * len(trace.outputs),
        state_seqs=(state_seqs,) * num_states,
        final_states=(not state_seqs,) * num_states,
        segment=plan.backward.chunk if checkpoints else 0,
        chunk=config.chunk,
        prefetch=config.prefetch,
    )
    tensors = operands.tensors
    tensors |= _numbered(Role.OUTPUT, result.outputs)
    tensors |= _numbered(Role.STATE_SEQ, result.state_seqs)
    tensors |= _numbered(Role.FINAL_STATE, result.final_states)
    tensors |= _numbered(Role.CHECKPOINT, result.checkpoints)
    launch(step.forward_kernel(spec), tensors, operands.sizes, config, device)
    return result


def run_backward(
    step: Specialization,
    arguments: Arguments,
    checkpoints: tuple[Tensor, ...],
    cotangents: Cotangents,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Scans backward.

    Args:
        arguments: as in the forward.
        checkpoints: from the forward.
        wanted: for each of `[*inputs, *states, *lifted]`, whether its gradient is asked for.

    Returns:
        A gradient for each that is asked for, shaped like the tensor; zeros where no gradient flows.
    """
    trace, device = step.trace, arguments.device
    num_inputs, num_states = trace.num_inputs, trace.num_states
    wanted_inputs = tuple(wanted[:num_inputs])
    wanted_states = tuple(wanted[num_inputs : num_inputs + num_states])
    wanted_lifted = tuple(wanted[num_inputs + num_states :])
    # The states' gradients are carried from step to step whether anybody asks for them or not.
    carried = tuple(value.dtype.is_floating_point for value in trace.states)
    differentiable_outputs = trace.differentiable[: trace.num_outputs]
    differentiable_states = trace.differentiable[trace.num_outputs :]
    present = tuple(
        g is not None and d for g, d in zip(cotangents.outputs, differentiable_outputs, strict=True)
    )
    flowing = (*present, *differentiable_states)
    vjp, source = step.vjp(flowing, (*wanted_inputs, *carried, *wanted_lifted))
    empty = arguments.num_steps == 0 or 0 in trace.step_shape
    if source is None or empty:
        return _zero_gradients(arguments, cotangents, wanted, passes_final=empty)

    # The kernel computes the states again: it reads what the forward reads, too.
    layouts = {**trace.forward.layouts, **vjp.layouts}
    operands = _Operands(step, arguments, layouts)
    config = step.plan(math.prod(trace.step_shape)).backward
    spec = BackwardSpec(
        inputs=operands.inputs,
        states=operands.states,
        state_dtypes=step.state_dtypes,
        lifted=operands.lifted,
        num_outputs=trace.num_outputs,
        grad_outputs=present,
        grad_state_seqs=_present(cotangents.state_seqs, num_states),
        grad_final_states=_present(cotangents.final_states, num_states),
        gradients=vjp.gradients,
        grad_inputs=wanted_inputs,
        grad_states=wanted_states,
        grad_lifted=wanted_lifted,
        lifted_dtypes=step.lifted_dtypes,
        chunk=config.chunk,
    )
    full = (arguments.num_steps, *trace.step_shape)
    grad_inputs = [
        torch.empty(full, dtype=x.dtype, device=device) if want else None
        for x, want in zip(arguments.inputs, wanted_inputs, strict=True)
    ]
    grad_states = [
        torch.empty(trace.step_shape, dtype=value.dtype, device=device) if want else None
        for value, want in zip(trace.states, wanted_states, strict=True)
    ]
    partial_sums = [
        torch.empty(trace.step_shape, dtype=_sum_dtype(value.dtype), device=device) if want else None
        for value, want in zip(trace.lifted_values, wanted_lifted, strict=True)
    ]
    tensors = operands.tensors
    tensors |= _numbered(Role.CHECKPOINT, checkpoints)
    tensors |= _numbered(Role.GRAD_OUTPUT, _contiguous(cotangents.outputs))
    tensors |= _numbered(Role.GRAD_STATE_SEQ, _contiguous(cotangents.state_seqs))
    tensors |= _numbered(Role.GRAD_FINAL_STATE, _contiguous(cotangents.final_states))
    tensors |= _numbered(Role.GRAD_INPUT, grad_inputs)
    tensors |= _numbered(Role.GRAD_STATE, grad_states)
    tensors |= _numbered(Role.GRAD_LIFTED, partial_sums)
    launch(step.backward_kernel(spec, source), tensors, operands.sizes, config, device)

    return [
        *(
            None if g is None else _sum_to(g, x.shape)
            for g, x in zip(grad_inputs, arguments.inputs, strict=True)
        ),
        *grad_states,
        *(
            None if g is None else _lifted_gradient(g, layouts[i], arguments.lifted[i])
            for i, g in enumerate(partial_sums)
        ),
    ]


class _Operands:
    """What a kernel reads of the forward's arguments: layouts, tensors, sizes."""

    def __init__(
        self, step: Specialization, arguments: Arguments, layouts: dict[int, LiftedLayout]
    ) -> None:
        shape = step.trace.step_shape
        ncl = math.prod(shape)
        self.sizes: dict[str, int] = {"T": arguments.num_steps, "NCL": ncl}
        self.tensors: dict[Param, Tensor] = {}
        self.inputs = tuple(self._input(i, x, shape, ncl) for i, x in enumerate(arguments.inputs))
        self.states = tuple(self._state(i, v, shape) for i, v in enumerate(arguments.states))
        self.lifted = tuple(
            self._lifted(i, w, layouts.get(i), shape, arguments.device)
            for i, w in enumerate(arguments.lifted)
        )

    def _input(self, i: int, x: Tensor, shape: tuple[int, ...], ncl: int) -> InputLayout:
        param = Param(Role.INPUT, i)
        self.tensors[param] = x
        if x.is_contiguous() and tuple(x.shape[1:]) == shape:
            return InputLayout()
        strides = broadcast_strides(x.shape[1:], x.stride()[1:], shape)
        terms = self._terms(param, step_terms(shape, strides))
        strided_time = x.stride(0) != ncl
        if strided_time:
            self.sizes[f"{param.name}_time"] = x.stride(0)
        return InputLayout(terms.layout, strided_time)

    def _state(self, i: int, state: Tensor | None, shape: tuple[int, ...]) -> int | None:
        if state is None:
            return None
        param = Param(Role.STATE, i)
        self.tensors[param] = state
        return self._terms(param, step_terms(shape, state.stride())).layout

    def _lifted(
        self,
        i: int,
        tensor: Tensor,
        layout: LiftedLayout | None,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> int:
        if layout is None:
            return DENSE  # never read
        param = Param(Role.LIFTED, i)
        # The layout counts in elements of the contiguous tensor. A CPU scalar among CUDA tensors is moved.
        flat = tensor.detach().to(device).contiguous().resolve_neg().view(-1)
        self.tensors[param] = flat[layout.offset :] if layout.offset else flat
        return self._terms(param, step_terms(shape, layout.strides)).layout

    def _terms(self, param: Param, terms: Terms) -> Terms:
        for i, number in enumerate(terms.numbers):
            kind = ("inner", "size", "stride")[i % 3]
            self.sizes[f"{param.name}_{kind}{i // 3}"] = number
        return terms


def checkpoint_rows(num_steps: int, chunk: int) -> int:
    """States are kept before each segment but the first: chunks, then single steps."""
    segments = num_steps // chunk + num_steps % chunk
    return segments - 1 if num_steps > 0 else 0


def _zero_gradients(
    arguments: Arguments, cotangents: Cotangents, wanted: Sequence[bool], *, passes_final: bool
) -> list[Tensor | None]:
    """Without a step, the final states are the initial ones, and so are their gradients."""
    primals = (*arguments.inputs, *arguments.states, *arguments.lifted)
    finals = (None,) * len(arguments.inputs) + tuple(cotangents.final_states)
    gradients: list[Tensor | None] = []
    for i, (primal, want) in enumerate(zip(primals, wanted, strict=True)):
        if not want or primal is None:
            gradients.append(None)
        elif passes_final and i < len(finals) and (final := finals[i]) is not None:
            gradients.append(final.clone(memory_format=torch.contiguous_format))
        else:
            gradients.append(primal.new_zeros(primal.shape))
    return gradients


def _lifted_gradient(partial_sums: Tensor, layout: LiftedLayout, tensor: Tensor) -> Tensor:
    """Sums over the elements of the step that read the same element of the captured tensor."""
    summed = [d for d, stride in enumerate(layout.strides) if stride == 0 and partial_sums.shape[d] > 1]
    # A fixed order of summation, so that two runs agree to the last bit.
    reduced = partial_sums.sum(summed, keepdim=True) if summed else partial_sums
    gradient = torch.zeros(tensor.shape, dtype=partial_sums.dtype, device=partial_sums.device)
    # Written through the same view of the tensor that the step read it by.
    gradient.as_strided(reduced.shape, layout.strides, layout.offset).copy_(reduced)
    return gradient.to(dtype=tensor.dtype, device=tensor.device)


def _sum_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sums over the dimensions in which an input broadcasts to the step."""
    if gradient.shape == shape:
        return gradient
    lead = gradient.dim() - len(shape)
    # Behind T, the input may have fewer dimensions than the step.
    aligned = (shape[0], *(1,) * lead, *shape[1:])
    summed = [d for d, (g, s) in enumerate(zip(gradient.shape, aligned, strict=True)) if s == 1 and g != 1]
    return (gradient.sum(summed, keepdim=True) if summed else gradient).reshape(shape)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _numbered(role: Role, tensors: Iterable[Tensor | None]) -> dict[Param, Tensor]:
    return {Param(role, i): t for i, t in enumerate(tensors) if t is not None}


def _contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.contiguous().resolve_neg() for t in tensors]


def _present(tensors: Sequence[Tensor | None], count: int) -> tuple[bool, ...]:
    return tuple(t is not None for t in tensors) or (False,) * count
