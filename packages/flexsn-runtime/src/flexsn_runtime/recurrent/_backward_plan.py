"""Which steps of a backward have the same VJP, and what it needs memory for: the same in each call of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexsn_graph import Port, Role, StagedStep

if TYPE_CHECKING:
    from flexsn_runtime.recurrent._staged import RecurrentSpecialization


class Segment(NamedTuple):
    """Steps that have the same VJP.

    Attributes:
        start: the first of them.
        num_steps: how many they are.
        staged: their VJP.
    """

    start: int
    num_steps: int
    staged: StagedStep


class BackwardPlan(NamedTuple):
    """The common part of backwards that receive the same gradients.

    Attributes:
        segments: the steps, the last ones first, by which gradients come to them.
        results: of all segments.
        of_inputs: those that are gradients of inputs, with shape and dtype of one step's.
        sequences: the values of which each step needs memory of its own, in one segment or another.
        absent: the gradients of states that need no zeros in memory: a scan begins with zeros for them.
    """

    segments: tuple[Segment, ...]
    results: frozenset[Port]
    of_inputs: dict[Port, tuple[tuple[int, ...], torch.dtype]]
    sequences: frozenset[Port]
    absent: frozenset[Port]


def backward_plan(
    step: RecurrentSpecialization,
    num_steps: int,
    kept: frozenset[Port],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    state_seqs: bool,
) -> BackwardPlan:
    """The plan of a backward.

    Args:
        num_steps: T, at least 1.
        kept: what the forward kept.
        grads: those of the scan's results.
        needed: for each of `[*inputs, *states, *lifted]`, whether its gradient is needed.
        state_seqs: whether the scan returned the states of all steps.
    """
    present = tuple([g is not None for g in grads])
    key = (num_steps, kept, present, tuple(needed), state_seqs)
    plan = step.backward_plans.get(key)
    if plan is None:
        segments = tuple(_segments(step, num_steps, kept, present, needed, state_seqs=state_seqs))
        steps = [segment.staged for segment in segments]
        results = {port: staged for staged in reversed(steps) for port in staged.results}
        of_inputs = {p: staged.values[p] for p, staged in results.items() if p.role is Role.GRAD_INPUT}
        sequences = frozenset[Port]().union(*(staged.sequences for staged in steps))
        absent = steps[0].absent
        plan = step.backward_plans[key] = BackwardPlan(segments, frozenset(results), of_inputs, sequences, absent)
    return plan


def _segments(
    step: RecurrentSpecialization,
    num_steps: int,
    kept: frozenset[Port],
    arrives: Sequence[bool],
    needed: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Segment]:
    """The steps, the last ones first, by which gradients come to them.

    To the last step comes no gradient of a state that is in no loss; nor, where that leads to none, to those before.
    Zeros in their place would be wrong where they meet an infinite derivative; if no step but the last lacks any, and
    a flag can mark the last one, all steps have the same VJP.

    Args:
        arrives: for each result of the scan, whether a gradient of it came.
    """
    trace = step.trace
    differentiable = trace.differentiable
    count = trace.num_outputs
    present = tuple(a and d for a, d in zip(arrives[:count], differentiable, strict=False))
    came = tuple(arrives[count:])
    absent = frozenset(Port(Role.GRAD_STATE, i) for i, d in enumerate(differentiable[count:]) if d and not came[i])
    if num_steps > 1 and absent:
        of_states = needed[trace.num_inputs : trace.num_inputs + trace.num_states]
        unneeded = (
            frozenset(port for port in absent if not of_states[port.index]) if not state_seqs else frozenset[Port]()
        )
        flows = (*present, *differentiable[count:])
        whole = step.vjp_of_all_steps(flows, step.carrying(needed), kept, absent, unneeded)
        if whole is not None:
            return [Segment(0, num_steps, whole)]
    segments: list[Segment] = []
    end = num_steps
    while end > 0:
        flows = tuple(c and d for c, d in zip(came, differentiable[count:], strict=True))
        staged = step.vjp((*present, *flows), step.carrying(needed), kept)
        found = {port.index for port in staged.results if port.role is Role.GRAD_STATE}
        after = tuple(i in found or (state_seqs and arrives[count + i]) for i in range(trace.num_states))
        if len(segments) > trace.num_states:  # which come goes in a circle, as between states that change places
            after = came = (True,) * trace.num_states
            staged = step.vjp((*present, *differentiable[count:]), step.carrying(needed), kept)
        start = 0 if after == came else end - 1
        segments.append(Segment(start, end - start, staged))
        came, end = after, start
    return segments
