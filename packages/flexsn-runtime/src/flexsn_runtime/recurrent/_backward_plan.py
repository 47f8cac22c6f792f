"""The part of a backward that all calls of one kind share: groups of steps with the same VJP, and values in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexsn_graph import Port, Role, StagedStep

if TYPE_CHECKING:
    from flexsn_runtime.recurrent._staged import RecurrentSpecialization


class Segment(NamedTuple):
    """Consecutive steps that share a VJP.

    Attributes:
        start: index of the first step.
        num_steps: number of steps.
        staged: VJP of these steps.
    """

    start: int
    num_steps: int
    staged: StagedStep


class BackwardPlan(NamedTuple):
    """The common part of backwards that receive gradients of the same results.

    Attributes:
        segments: groups of steps that receive the same gradients, with the last steps first.
        results: results of all segments.
        of_inputs: the gradients of inputs among the results, with their shape and dtype for one step.
        sequences: values that need memory for each step in at least one segment.
        absent: gradients of states whose memory is not filled with zeros at allocation, because the scan over
            the last steps fills it when the scan begins.
    """

    segments: tuple[Segment, ...]
    results: frozenset[Port]
    of_inputs: dict[Port, tuple[tuple[int, ...], torch.dtype]]
    sequences: frozenset[Port]
    absent: frozenset[Port]


def backward_plan(
    step: RecurrentSpecialization,
    num_steps: int,
    kept_ports: frozenset[Port],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    *,
    state_seqs: bool,
) -> BackwardPlan:
    """Returns the plan of a backward.

    Args:
        num_steps: T, at least 1.
        kept_ports: ports of the values that the forward kept.
        grads: gradients of the scan's results.
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if its gradient is needed.
        state_seqs: True if the scan returned the states of all steps.
    """
    present = tuple([g is not None for g in grads])
    key = (num_steps, kept_ports, present, tuple(needs_grad), state_seqs)
    plan = step.backward_plans.get(key)
    if plan is None:
        segments = tuple(_group_steps(step, num_steps, kept_ports, present, needs_grad, state_seqs=state_seqs))
        steps = [segment.staged for segment in segments]
        results = {port: staged for staged in reversed(steps) for port in staged.results}
        of_inputs = {p: staged.values[p] for p, staged in results.items() if p.role is Role.GRAD_INPUT}
        sequences = frozenset[Port]().union(*(staged.sequences for staged in steps))
        absent = steps[0].absent
        plan = step.backward_plans[key] = BackwardPlan(segments, frozenset(results), of_inputs, sequences, absent)
    return plan


def _group_steps(
    step: RecurrentSpecialization,
    num_steps: int,
    kept_ports: frozenset[Port],
    arrives: Sequence[bool],
    needs_grad: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Segment]:
    """Groups the steps by the gradients that they receive, with the last steps first.

    If no loss depends on a final state, the last step receives no gradient of this state. Earlier steps receive no
    gradient of this state either, unless a gradient flows to the state from another result. Zeros instead of such
    absent gradients would be wrong, because an infinite derivative would turn zeros into NaN. If gradients are absent
    in the last step only, a flag may mark this step, so that all steps share a VJP.

    Args:
        arrives: for each result of the scan, True if its gradient arrives.
    """
    trace = step.trace
    differentiable = trace.differentiable
    count = trace.num_outputs
    present = tuple(a and d for a, d in zip(arrives[:count], differentiable, strict=False))
    arriving = tuple(arrives[count:])
    absent = frozenset(Port(Role.GRAD_STATE, i) for i, d in enumerate(differentiable[count:]) if d and not arriving[i])
    if num_steps > 1 and absent:
        of_states = needs_grad[trace.num_inputs : trace.num_inputs + trace.num_states]
        unneeded = (
            frozenset(port for port in absent if not of_states[port.index]) if not state_seqs else frozenset[Port]()
        )
        flows = (*present, *differentiable[count:])
        shared_vjp = step.vjp_of_all_steps(flows, step.carrying(needs_grad), kept_ports, absent, unneeded)
        if shared_vjp is not None:
            return [Segment(0, num_steps, shared_vjp)]
    segments: list[Segment] = []
    end = num_steps
    while end > 0:
        flows = tuple(c and d for c, d in zip(arriving, differentiable[count:], strict=True))
        staged = step.vjp((*present, *flows), step.carrying(needs_grad), kept_ports)
        produced_states = {port.index for port in staged.results if port.role is Role.GRAD_STATE}
        after = tuple(i in produced_states or (state_seqs and arrives[count + i]) for i in range(trace.num_states))
        if len(segments) > trace.num_states:  # the pattern of gradients repeats
            after = arriving = (True,) * trace.num_states
            staged = step.vjp((*present, *differentiable[count:]), step.carrying(needs_grad), kept_ports)
        start = 0 if after == arriving else end - 1
        segments.append(Segment(start, end - start, staged))
        arriving, end = after, start
    return segments
