"""Decides which scans process segments of time in parallel."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch

from flexsn_graph import Role, StepGraph, is_linear
from flexsn_runtime._torch_private import size_hint
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.plans._segments import SegmentRule, rule_in_place_of
from flexsn_runtime.segments._speculation import Speculation
from flexsn_runtime.step._pointwise_step import Specialization

# Maximum number S of states for maps of segments. A map keeps S * S + S values in registers, and its kernel evaluates
# each step S + 1 times.
_MOST_STATES = 4

# Maps of S states pay off with at least S plus this number of segments. A backward in segments computes each step
# twice, and its VJP S + 2 times.
_MORE_SEGMENTS = 3


class Choice(NamedTuple):
    """The division of one scan into segments.

    Attributes:
        rule: rule that led to this choice.
        number: number of segments. For a forward, this is the number with the first warm-up of the rule.
    """

    rule: SegmentRule
    number: int


class AheadChoice(NamedTuple):
    """The division of a forward scan into segments, in a program that is compiled ahead of time.

    Attributes:
        number: number of segments, at least 1. It is a symbol if the number of steps is a symbol.
        warm_up: warm-up in steps.
    """

    number: int
    warm_up: int


def choose_segments(step: Specialization, arguments: Arguments) -> Choice | None:
    """Chooses the segments of a scan over arguments of this layout; `None` for a serial scan."""
    if step.late:
        return None
    return _choose(step, arguments.num_steps, math.prod(step.trace.step_shape))


def may_run_in_segments(step: Specialization, num_steps: int | None, ncl: int | None, *, recorded: bool) -> bool:
    """True if the operator with segments pays off for scans of this size in a compiled graph.

    Args:
        num_steps, ncl: number of steps, and number of elements of a step; `None` if unknown.
        recorded: True if the graph runs as a CUDA graph, False if Python launches the kernels.
    """
    choice = _choose(step, num_steps, ncl)
    return choice is not None and (recorded or (num_steps or 0) >= choice.rule.launched)


def _choose(step: Specialization, num_steps: int | None, ncl: int | None) -> Choice | None:
    rule = rule_in_place_of(step.backend.segments())
    if rule is None or not step.walks_segments or type(num_steps) is not int or type(ncl) is not int or ncl == 0:
        return None
    if ncl * step.cost.moved >= rule.moved:
        return None
    number = rule.count(ncl, max(num_steps, 1))
    return Choice(rule, number) if number > 1 and step.trace.states else None


def speculation(step: Specialization, choice: Choice) -> Speculation:
    """Returns the step's `Speculation`, which contains the warm-up that its forwards have learned."""
    learned = step.speculations.get(choice.rule)
    if learned is None:
        key = None
        if choice.rule.is_stored:
            core = step.core()
            key = {**step.plan_key(), "numbers": core.integers, "first": choice.rule.warm_up}
        learned = step.speculations[choice.rule] = Speculation(choice.rule, key)
    return learned


def choose_ahead(step: Specialization, num_steps: int, ncl: int) -> AheadChoice | None:
    """Chooses the segments of a forward scan in a program that is compiled ahead of time; `None` for a serial scan.

    The program cannot learn a warm-up. It uses the warm-up that earlier calls of this step have learned, or otherwise
    half of the longest warm-up. Most trajectories that converge at all converge within this number of steps.

    Args:
        num_steps, ncl: number of steps, and number of elements of a step. Each may be a symbol. The choice is made for
            the hints of symbols, and is correct for all of their values.
    """
    hints = size_hint(num_steps), size_hint(ncl)
    choice = _choose(step, *hints)
    if choice is None or step.numerics.fast_math:
        return None
    learned = speculation(step, choice)
    if not learned.converges:
        return None
    warm_up = learned.warm_up if learned.is_known else choice.rule.longest // 2
    number = choice.rule.count(hints[1] or 0, hints[0] or 0, warm_up)
    if number < 2:
        return None
    if type(num_steps) is int:
        return AheadChoice(number, warm_up)
    steps = max(choice.rule.steps, warm_up)
    symbol = torch.sym_max(1, torch.sym_min(number, num_steps // steps))
    return AheadChoice(cast(int, symbol), warm_up)


def has_enough(num_states: int, choice: Choice) -> bool:
    """True if there are enough segments for maps of `num_states` states."""
    return num_states <= _MOST_STATES and choice.number >= num_states + _MORE_SEGMENTS


def composes(vjp: StepGraph, num_inputs: int, num_states: int, choice: Choice) -> bool:
    """True if a backward can combine segments, and there are enough segments.

    Args:
        vjp: the VJP of the step. It may be nonlinear in its cotangents if it contains a backward formula of the user.
    """
    carried = sum(position is not None for position in vjp.gradients[num_inputs : num_inputs + num_states])
    return carried > 0 and has_enough(carried, choice) and is_linear(vjp, (Role.GRAD_OUTPUT, Role.GRAD_STATE))
