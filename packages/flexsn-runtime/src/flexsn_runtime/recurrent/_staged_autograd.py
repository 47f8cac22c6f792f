"""A scan over a step with matrix products, with gradients: the memory of its values, and one `autograd.Function`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsn_graph import Phase, Port, Product, Role, Stage, StagedStep
from flexsn_runtime._torch_private import SingleLevelFunction, is_batched
from flexsn_runtime.kernels._autograd import not_differentiable, refuse_double_backward, scan_pointwise, several_at_once
from flexsn_runtime.kernels._sums import input_gradient
from flexsn_runtime.operands._layout import contiguous_strides
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.operands._order import strides_like
from flexsn_runtime.recurrent._over_time import OverTime, Rows
from flexsn_runtime.recurrent._staged import RecurrentSpecialization, StagedScan
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization

_WRITTEN = frozenset({Role.OPERAND, Role.PRODUCT})


def scan(step: CoreSpecialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if need be."""
    if isinstance(step, RecurrentSpecialization):
        return scan_staged(step, arguments, state_seqs=state_seqs)
    assert isinstance(step, Specialization)
    return scan_pointwise(step, arguments, state_seqs=state_seqs)


def scan_staged(step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """`(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if need be."""
    tensors = arguments.all
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        results: tuple[Tensor, ...] = _StagedScan.apply(step, state_seqs, arguments, *tensors)
        return results
    with torch.no_grad(), without_autocast(arguments.device):
        return forward_staged(step, arguments, state_seqs=state_seqs, kept=frozenset())[0]


class _StagedScan(SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, step: RecurrentSpecialization, state_seqs: bool, arguments: Arguments, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        wanted = step.carrying(ctx.needs_input_grad[3:])
        kept = frozenset(step.kept(wanted))
        with without_autocast(arguments.device):
            returned, memory = forward_staged(step, arguments, state_seqs=state_seqs, kept=kept)
        ctx.ports = tuple(memory)
        ctx.save_for_backward(*tensors, *memory.values())
        ctx.step, ctx.state_seqs, ctx.kept = step, state_seqs, kept
        ctx.set_materialize_grads(False)
        fixed = not_differentiable(step, returned, arguments.num_steps, state_seqs=state_seqs)
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        step: RecurrentSpecialization = ctx.step
        step.check_backward()
        if any(map(is_batched, grads)):
            raise several_at_once()
        trace, saved = step.trace, ctx.saved_tensors
        count = trace.num_inputs + trace.num_states + len(trace.lifted_values)
        arguments = Arguments.of(saved[:count], trace.num_inputs, trace.num_states, len(trace.lifted_values))
        memory = dict(zip(ctx.ports, saved[count:], strict=True))
        needed = ctx.needs_input_grad[3:]
        with torch.no_grad(), without_autocast(arguments.device):
            gradients = backward_staged(step, arguments, memory, ctx.kept, grads, needed, state_seqs=ctx.state_seqs)
        if torch.is_grad_enabled():  # `create_graph`
            gradients = refuse_double_backward(gradients, (*saved, *grads))
        return None, None, None, *gradients


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Conversions are in the graph."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _sequences(staged: StagedStep) -> set[Port]:
    """The values of which each step needs memory of its own, because they are read when the loop is over."""
    found = {view.source for term in staged.terms for view in term.values}
    for part in staged.parts:
        if part.phase is not Phase.LOOP:
            found |= {view.source for view in part.reads}
            found |= {view.source for view in _writes_of(part)}
    return found


def _writes_of(part: Stage | Product) -> Sequence[Any]:
    return part.writes if isinstance(part, Stage) else (part.result,)


def _intermediates(
    staged: StagedStep, num_steps: int, sequences: set[Port] | frozenset[Port], device: torch.device
) -> dict[Port, Rows]:
    """Memory for operands and products."""
    found = {}
    for port, (shape, dtype) in staged.values.items():
        if port.role in _WRITTEN:
            rows = num_steps if port in sequences else 1
            make = torch.zeros if port in staged.assembled else torch.empty
            found[port] = Rows(make((rows, *shape), dtype=dtype, device=device), 0, num_steps)
    return found


def forward_staged(
    step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool, kept: frozenset[Port]
) -> tuple[tuple[Tensor, ...], dict[Port, Tensor]]:
    """The results, and the memory of what is kept."""
    trace, num_steps, device = step.trace, arguments.num_steps, arguments.device
    staged, shape = trace.forward, trace.step_shape
    form = step.format(arguments.inputs, arguments.states)
    outputs = [
        torch.empty_strided((num_steps, *shape), form.sequence, dtype=v.dtype, device=device) for v in trace.outputs
    ]
    sequences = _sequences(staged) | kept
    states: list[Tensor] = []
    for i, (initial, value) in enumerate(zip(arguments.states, trace.states, strict=True)):
        whole = state_seqs or Port(Role.STATE, i) in sequences
        memory = torch.empty((num_steps + 1 if whole else 2, *shape), dtype=value.dtype, device=device)
        if initial is None:
            memory[0].zero_()
        else:
            memory[0].copy_(initial)
        states.append(memory)
    between = _intermediates(staged, num_steps, sequences, device)
    if num_steps and 0 not in shape:
        inputs = {Port(Role.INPUT, i): Rows(x.detach(), 0, num_steps) for i, x in enumerate(arguments.inputs)}
        before = {Port(Role.STATE, i): Rows(m, 0, num_steps) for i, m in enumerate(states)}
        behind = {Port(Role.STATE, i): Rows(m, 1, num_steps) for i, m in enumerate(states)}
        written = {Port(Role.OUTPUT, i): Rows(y, 0, num_steps) for i, y in enumerate(outputs)}
        over = OverTime.of(
            staged,
            num_steps,
            reads={**inputs, **before, **between},
            writes={**written, **behind, **between},
            lifted=arguments.lifted,
            lasting=sequences | {Port(Role.STATE, i) for i in range(len(states)) if state_seqs},
            from_zero=all(initial is None for initial in arguments.states),
        )
        StagedScan(step, over).run()
    keeping = {port: between[port].memory for port in kept if port in between}
    keeping |= {port: states[port.index] for port in kept if port.role is Role.STATE}
    if state_seqs:
        carried = [_copied(m[1:], form.sequence) for m in states]
    else:
        carried = [_copied(m[num_steps % m.shape[0]], form.step) for m in states]
    return (*outputs, *carried), keeping


def _copied(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """In memory of its own: what is kept for the backward is nobody's to change."""
    copy = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def backward_staged(
    step: RecurrentSpecialization,
    arguments: Arguments,
    memory: Mapping[Port, Tensor],
    kept: frozenset[Port],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Tensor | None]:
    """The gradients of `[*inputs, *states, *lifted]`; `None` where none is needed, or none flows."""
    trace, num_steps, device = step.trace, arguments.num_steps, arguments.device
    shape, num_outputs = trace.step_shape, trace.num_outputs
    first_lifted = trace.num_inputs + trace.num_states
    if num_steps == 0 or 0 in shape:
        return _without_steps(step, arguments, grads, needed, state_seqs=state_seqs)
    of_outputs, of_states = grads[:num_outputs], grads[num_outputs:]
    segments = _segments(step, num_steps, kept, grads, needed, state_seqs=state_seqs)
    results = {port for segment in segments for port in segment.staged.results}
    sequences = {port for segment in segments for port in _sequences(segment.staged)}
    carried: dict[int, Tensor] = {}
    for i, value in enumerate(trace.states):
        port = Port(Role.GRAD_STATE, i)
        g = of_states[i]
        if g is None and port not in results:
            continue
        # The gradient after step t is in row t + 1, that before it in row t.
        rows = num_steps + 1 if state_seqs or port in sequences else 2
        carried[i] = gradient = torch.zeros((rows, *shape), dtype=value.dtype, device=device)
        if g is not None and not state_seqs:
            gradient[num_steps % rows].copy_(g)
    gradients: list[Tensor | None] = [None] * len(needed)
    for i, x in enumerate(arguments.inputs):
        port = Port(Role.GRAD_INPUT, i)
        if port in results:
            like, dtype = next(s.staged.values[port] for s in segments if port in s.staged.results)
            full = (num_steps, *like)
            strides = strides_like(x) if x.shape == full else contiguous_strides(full)
            gradients[i] = torch.empty_strided(full, strides, dtype=dtype, device=device)
    for segment in segments:
        start, count, staged = segment.start, segment.num_steps, segment.staged
        between = _intermediates(staged, count, _sequences(staged), device)
        reads: dict[Port, Rows] = dict(between)
        writes: dict[Port, Rows] = dict(between)
        reads |= {Port(Role.INPUT, i): Rows(x.detach(), start, count) for i, x in enumerate(arguments.inputs)}
        reads |= {port: Rows(rows, start, count) for port, rows in memory.items() if port.role is Role.STATE}
        reads |= {Port(Role.SAVED, i): Rows(memory[port], start, count) for i, port in enumerate(staged.saved)}
        for i, g in enumerate(of_outputs):
            if g is not None:
                reads[Port(Role.GRAD_OUTPUT, i)] = Rows(g.resolve_neg(), start, count)
        for i, gradient in carried.items():
            reads[Port(Role.GRAD_STATE, i)] = Rows(gradient, start + 1, count)
            writes[Port(Role.GRAD_STATE, i)] = Rows(gradient, start, count)
        for i in range(trace.num_inputs):
            of_input = gradients[i]
            if of_input is not None and Port(Role.GRAD_INPUT, i) in staged.results:
                writes[Port(Role.GRAD_INPUT, i)] = Rows(of_input, start, count)
            elif of_input is not None:
                of_input[start : start + count].zero_()
        arriving = [
            (carried[i][start:], g[start:]) for i, g in enumerate(of_states) if state_seqs and g is not None
        ]
        lasting = _sequences(staged)
        over = OverTime.of(staged, count, reads, writes, arguments.lifted, lasting, backwards=True)
        scan = StagedScan(step, over)
        scan.run(arriving)
        for term in staged.terms:
            place = first_lifted + term.lifted
            if needed[place]:
                part, before = scan.summed(term), gradients[place]
                gradients[place] = part if before is None else before + part
    for i, x in enumerate(arguments.inputs):
        gradient_of = gradients[i]
        if gradient_of is not None and gradient_of.shape != x.shape:
            gradients[i] = input_gradient(gradient_of, x, by_program=False)
    for i, gradient in carried.items():
        initial = arguments.states[i]
        flows = Port(Role.GRAD_STATE, i) in segments[-1].staged.results
        if flows and needed[trace.num_inputs + i] and initial is not None:
            gradients[trace.num_inputs + i] = _copied(gradient[0], strides_like(initial))
    for place, tensor in enumerate(arguments.lifted, first_lifted):
        gradient_of = gradients[place]
        if gradient_of is not None:
            gradients[place] = gradient_of.reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)
    return gradients


class _Segment(NamedTuple):
    """Steps that have the same VJP."""

    start: int
    num_steps: int
    staged: StagedStep


def _segments(
    step: RecurrentSpecialization,
    num_steps: int,
    kept: frozenset[Port],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[_Segment]:
    """The steps, the last ones first, by which gradients come to them.

    To the last step comes no gradient of a state that is in no loss; nor, where that leads to none, to those before.
    Zeros in their place would be wrong where they meet an infinite derivative.
    """
    trace = step.trace
    differentiable = trace.differentiable
    count = trace.num_outputs
    present = tuple(g is not None and d for g, d in zip(grads[:count], differentiable, strict=False))
    came = tuple(g is not None for g in grads[count:])
    segments: list[_Segment] = []
    end = num_steps
    while end > 0:
        flows = tuple(c and d for c, d in zip(came, differentiable[count:], strict=True))
        staged = step.vjp((*present, *flows), step.carrying(needed), kept)
        found = {port.index for port in staged.results if port.role is Role.GRAD_STATE}
        after = tuple(
            i in found or (state_seqs and grads[count + i] is not None) for i in range(trace.num_states)
        )
        if len(segments) > trace.num_states:  # which come goes in a circle, as between states that change places
            after = came = (True,) * trace.num_states
            staged = step.vjp((*present, *differentiable[count:]), step.carrying(needed), kept)
        start = 0 if after == came else end - 1
        segments.append(_Segment(start, end - start, staged))
        came, end = after, start
    return segments


def _without_steps(
    step: RecurrentSpecialization,
    arguments: Arguments,
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Tensor | None]:
    """Without a step, the final states are the initial ones, and so are their gradients."""
    trace = step.trace
    gradients: list[Tensor | None] = [None] * len(needed)
    empty = math.prod(trace.step_shape) == 0 and arguments.num_steps > 0
    for i, tensor in enumerate(arguments.all):
        if empty and needed[i] and tensor is not None:
            gradients[i] = torch.zeros_like(tensor)
    if not state_seqs and not empty:
        for i in range(trace.num_states):
            if needed[trace.num_inputs + i]:
                gradients[trace.num_inputs + i] = grads[trace.num_outputs + i]
    return gradients
