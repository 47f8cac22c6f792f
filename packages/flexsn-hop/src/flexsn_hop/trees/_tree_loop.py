"""``scan`` as a plain loop."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flexsn_hop._torch_private import outside_of_tracing, unlogged
from flexsn_hop.errors import EmptyScanError
from flexsn_hop.formats import order_like
from flexsn_hop.loop._eager import Tensors, run_steps, stack_values, state_copies
from flexsn_hop.trees._trees import TreeCall, TreeSteps, check_sequence_dims

__all__ = ["as_given", "clock", "in_order", "run_trees"]


def clock(states: Sequence[torch.Tensor], length: Any) -> torch.Tensor:
    """Returns a sequence of T unused zeros, for a loop over time without input sequences.

    The sequence has memory for T elements. If it were an expanded tensor, compilers would check whether T is 1, which
    is unknown if T depends on data.
    """
    like = states[0] if states else torch.zeros(())
    return torch.zeros(length, dtype=like.dtype, device=like.device)


def run_trees(call: TreeCall) -> tuple[Any, Any]:
    """Runs the loop on plain tensors, or on tensors of a transform of ``torch.func``."""
    take_step = TreeSteps(call)
    if call.steps == 0:
        outputs = _allocate_empty_outputs(call, take_step)
        finals = state_copies(call.states, call.states, call.states)
    else:
        inputs = [in_order(sequence, False, call.dim) for sequence in call.inputs] or [clock(call.states, call.length)]
        interval = call.remat if call.remat is not None and torch.is_grad_enabled() else call.steps
        outputs_by_step, last = _run_segments(take_step, inputs, call.states, min(interval, call.steps), call.reverse)
        if call.reverse:
            outputs_by_step.reverse()
        outputs = stack_values(inputs, call.states, outputs_by_step)
        finals = state_copies(inputs, call.states, last)
    assert take_step.y is not None
    check_sequence_dims(take_step.y, "ys", outputs, call.dim)
    return call.carry.fill(finals), take_step.y.fill([as_given(output, False, call.dim) for output in outputs])


def _run_segments(
    take_step: TreeSteps, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], interval: int, backwards: bool
) -> tuple[list[Tensors], Tensors]:
    """Returns the outputs of every step, and the states after the last step.

    The backward recomputes each segment of ``interval`` steps, unless there is only one segment.
    """
    steps = inputs[0].shape[0]
    segments = list(zip(*[_split_segments(sequence, interval) for sequence in inputs], strict=True))
    if backwards:
        segments.reverse()
    outputs_by_step: list[Tensors] = []
    last = tuple(states)
    for parts in segments:
        first = len(outputs_by_step)

        def run(*tensors: torch.Tensor, first: int = first) -> tuple[list[Tensors], Tensors]:
            parts, states = tensors[: len(inputs)], tensors[len(inputs) :]

            def take(slices: Sequence[Any], states: Sequence[Any], step: int) -> tuple[Tensors, Tensors]:
                return take_step(slices, states, first + step)

            end = parts[0].shape[0] - 1
            outputs, after = run_steps(
                take if first else take_step, parts, states, [end], backwards=backwards, go_on=first > 0
            )
            return outputs, after[end]

        if interval == steps:
            outputs, last = run(*parts, *last)
        else:
            outputs, last = checkpoint(run, *parts, *last, use_reentrant=False)
        outputs_by_step += outputs
    return outputs_by_step, last


def _split_segments(sequence: torch.Tensor, interval: int) -> Sequence[torch.Tensor]:
    """Splits a sequence into segments, such that the gradient of the sequence has its memory format."""
    if interval == sequence.shape[0]:
        return [sequence]
    order = order_like(sequence)
    parts = sequence.permute(order).split(interval, order.index(0))
    return [part.permute([order.index(d) for d in range(len(order))]) for part in parts]


def in_order(sequence: torch.Tensor, reverse: bool, dim: int) -> torch.Tensor:
    """Returns the sequence as ``[T, *step]``, beginning with the slice that the first step takes."""
    if dim != 0:
        sequence = sequence.movedim(dim, 0)
    return sequence.flip(0) if reverse else sequence


def as_given(sequence: torch.Tensor, reverse: bool, dim: int) -> torch.Tensor:
    """Returns the sequence with time in the caller's dimension and direction."""
    if reverse:
        sequence = sequence.flip(0)
    return sequence if dim == 0 else sequence.movedim(0, dim)


def _allocate_empty_outputs(call: TreeCall, take_step: TreeSteps) -> Sequence[torch.Tensor]:
    """Returns a sequence of 0 steps for each output of the step."""
    slices = [sequence.movedim(call.dim, 0).new_empty(_remove_dim(sequence, call.dim)) for sequence in call.inputs]
    with outside_of_tracing([*slices, *call.states]) as fakes, torch.no_grad(), unlogged():
        try:
            outputs, _ = take_step(fakes[: len(slices)], fakes[len(slices) :], 0)
        except RuntimeError as error:
            raise EmptyScanError(
                "the scan is empty (T == 0), so step was called on tensors without data, to find the shapes of y, and "
                f"failed: {error}{_locate(error)}. Either step needs data, or step fails on data, too"
            ) from error
    return [torch.empty((0, *output.shape), dtype=output.dtype, device=output.device) for output in outputs]


def _locate(error: Exception) -> str:
    """Returns the user's line that raised an error, as text. The text is empty if no frame is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if not user_frames:
        return ""
    frame = user_frames[-1]
    return f' (File "{frame.filename}", line {frame.lineno}, in {frame.name} {frame.line})'


def _remove_dim(sequence: torch.Tensor, dim: int) -> list[int]:
    shape = list(sequence.shape)
    del shape[dim]
    return shape
