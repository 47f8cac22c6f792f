"""``scan`` as a plain loop."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexsn_hop._torch_private import outside_of_tracing, unlogged
from flexsn_hop.errors import EmptyScanError
from flexsn_hop.loop._eager import run_steps, stack_values, state_copies
from flexsn_hop.trees._trees import TreeCall, TreeSteps, check_sequence_dims

__all__ = ["as_given", "clock", "in_order", "run_trees"]


def clock(states: Sequence[torch.Tensor], length: Any) -> torch.Tensor:
    """A sequence of T numbers that nobody reads: the loop over time goes along its sequences.

    It has memory, because of what has none compilers ask whether T is 1, which is unknown where it depends on data.
    """
    like = states[0] if states else torch.zeros(())
    return torch.zeros(length, dtype=like.dtype, device=like.device)


def run_trees(call: TreeCall) -> tuple[Any, Any]:
    """The loop, for plain tensors or those of a transform."""
    take_step = TreeSteps(call)
    if call.steps == 0:
        outputs = _outputs_of_no_step(call, take_step)
        finals = state_copies(call.states, call.states, call.states)
    else:
        inputs = [in_order(sequence, False, call.dim) for sequence in call.inputs] or [clock(call.states, call.length)]
        last = [call.steps - 1]
        outputs_by_step, states_after = run_steps(take_step, inputs, call.states, last, backwards=call.reverse)
        if call.reverse:
            outputs_by_step.reverse()
        outputs = stack_values(inputs, call.states, outputs_by_step)
        finals = state_copies(inputs, call.states, states_after[call.steps - 1])
    assert take_step.y is not None
    check_sequence_dims(take_step.y, "ys", outputs, call.dim)
    return call.carry.fill(finals), take_step.y.fill([as_given(output, False, call.dim) for output in outputs])


def in_order(sequence: torch.Tensor, reverse: bool, dim: int) -> torch.Tensor:
    """``[T, *step]``, the first step first."""
    if dim != 0:
        sequence = sequence.movedim(dim, 0)
    return sequence.flip(0) if reverse else sequence


def as_given(sequence: torch.Tensor, reverse: bool, dim: int) -> torch.Tensor:
    """The same back: time where the caller has it."""
    if reverse:
        sequence = sequence.flip(0)
    return sequence if dim == 0 else sequence.movedim(0, dim)


def _outputs_of_no_step(call: TreeCall, take_step: TreeSteps) -> Sequence[torch.Tensor]:
    """Empty sequences like those that a step would give."""
    slices = [sequence.movedim(call.dim, 0).new_empty(_without(sequence, call.dim)) for sequence in call.inputs]
    with outside_of_tracing([*slices, *call.states]) as fakes, torch.no_grad(), unlogged():
        try:
            outputs, _ = take_step(fakes[: len(slices)], fakes[len(slices) :], 0)
        except RuntimeError as error:
            raise EmptyScanError(
                "the scan is empty (T == 0), and step, which was called on tensors without data to tell what y looks "
                f"like, failed: {error}{_place(error)}. Either it needs data, or it fails on data, too"
            ) from error
    return [torch.empty((0, *output.shape), dtype=output.dtype, device=output.device) for output in outputs]


def _place(error: Exception) -> str:
    """The line of the step that an error comes from, in words; nothing where it is inside of libraries alone."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f' (File "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name} {own[-1].line})' if own else ""


def _without(sequence: torch.Tensor, dim: int) -> list[int]:
    shape = list(sequence.shape)
    del shape[dim]
    return shape
