"""Runs the scans of an elementwise step that is given as graphs, or records them in a compiler's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import StepValue
from flexsn_hop import BackwardLayout, ScanLayout
from flexsn_runtime.graphs._graph_step import GraphSpecialization
from flexsn_runtime.graphs._symbols import Size
from flexsn_runtime.kernels._backward import BackwardScan, split_cotangents
from flexsn_runtime.kernels._forward import ForwardResult, ForwardScan
from flexsn_runtime.kernels._scan import forward_scan, run_backward
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.segments._choice import choose_ahead


def values_of(layout: ScanLayout, flat_args: Sequence[Any]) -> list[StepValue | Size]:
    """The arguments of one step. The arguments of the scan are `[*input_seqs, *init_states, *lifted]`."""
    return [
        StepValue(tuple(value.shape[i < layout.num_inputs :]), value.dtype) if isinstance(value, Tensor) else value
        for i, value in enumerate(flat_args)
    ]


def arguments_of(step: GraphSpecialization, layout: ScanLayout, flat_args: Sequence[Any]) -> Arguments:
    """Selects the arguments of a step's kernels from the arguments of the operator."""
    inputs, states, _ = layout.split(flat_args)
    lifted = tuple(flat_args[position] for position in step.lifted)
    return Arguments(tuple(inputs), tuple(unknown_states(layout, states)), lifted)


def unknown_states(layout: ScanLayout, states: Sequence[Tensor]) -> list[Tensor | None]:
    """The initial states; `None` for states that are known to be zeros."""
    zeros = layout.zero_states or (False,) * layout.num_states
    return [None if zero else state for state, zero in zip(states, zeros, strict=True)]


def scan_forward(
    step: GraphSpecialization, layout: ScanLayout, flat_args: Sequence[Any], *, ahead: bool = False
) -> list[Tensor]:
    """The results of the forward operator; see `flexsn_hop.ScanLowering`.

    Args:
        ahead: True if the program is compiled ahead of time. In this case, parallel segments of time are chosen during
            compilation.
    """
    interval, spare = layout.checkpoint_interval, layout.spare_checkpoints
    arguments = arguments_of(step, layout, flat_args)
    num_steps = arguments.num_steps
    none_kept = isinstance(num_steps, int) and num_steps <= interval
    nearer = bool(interval) and step.distance != interval
    training = interval > 0 and not (nearer and none_kept)
    spare_rows = _spare(num_steps) if nearer else spare
    result = _forward(
        step, arguments, state_seqs=not layout.final_state, training=training, spare_rows=spare_rows, ahead=ahead
    )
    if not nearer:
        return [*result.returned, *result.checkpoints]
    rows = (num_steps - 1) // interval + spare
    if none_kept:
        shape = step.trace.step_shape
        kept = [flat_args[0].new_zeros((rows, *shape), dtype=v.dtype) for v in step.trace.states]
        return [*result.returned, *kept]
    assert step.distance is not None
    return [*result.returned, *(_every(t, interval // step.distance, rows) for t in result.checkpoints)]


def scan_backward(
    step: GraphSpecialization,
    layout: BackwardLayout,
    flat_args: Sequence[Any],
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """The results of the backward operator; see `flexsn_hop.ScanLowering`.

    Args:
        flat_args, saved, gradients: results of `layout.split`. The gradients of outputs precede the gradients of
            states.
    """
    scan = layout.scan
    arguments = arguments_of(step, scan, flat_args)
    if step.distance != layout.saved_interval:  # the saved states are too far apart: runs the forward again
        spare = _spare(arguments.num_steps)
        saved = _forward(step, arguments, state_seqs=False, training=True, spare_rows=spare).checkpoints
    given = iter(gradients)
    came = [next(given) if present else None for present in (*layout.output_grads, *layout.state_grads)]
    cotangents = split_cotangents(came, scan.num_outputs, state_seqs=not scan.final_state)
    positions = (*range(scan.num_inputs + scan.num_states), *step.lifted)
    needs_grad = [layout.needs[position] for position in positions]
    if step.is_recorded:
        found = BackwardScan(step, arguments, saved, cotangents, needs_grad)(arguments, saved, cotangents)
    else:
        found = run_backward(step, arguments, saved, cotangents, needs_grad)
    results = []
    for position, need in enumerate(layout.needs):
        if need:
            gradient = found[positions.index(position)] if position in positions else None
            # The step does not read a lifted tensor that has no position.
            results.append(torch.zeros_like(flat_args[position]) if gradient is None else gradient)
    return results


def _forward(
    step: GraphSpecialization,
    arguments: Arguments,
    *,
    state_seqs: bool,
    training: bool,
    spare_rows: int,
    ahead: bool = False,
) -> ForwardResult:
    if step.is_recorded:  # sizes may be symbols, which cannot be keys
        segments = choose_ahead(step, arguments.num_steps, math.prod(step.trace.step_shape)) if ahead else None
        scan = ForwardScan(
            step, arguments, state_seqs=state_seqs, training=training, spare_rows=spare_rows, segments=segments
        )
    else:
        scan = forward_scan(step, arguments, state_seqs=state_seqs, training=training, spare_rows=spare_rows)
    return scan(arguments)


def _spare(num_steps: int) -> int:
    """Number of additional rows of checkpoints. With two of them, a symbolic number of rows is never 0 or 1."""
    return 0 if isinstance(num_steps, int) else 2


def _every(rows: Tensor, ratio: int, count: int) -> Tensor:
    """Returns the last row of each group of `ratio` rows, followed by meaningless rows up to `count` rows."""
    last = torch.arange(count, device=rows.device) * ratio + (ratio - 1)
    return rows.index_select(0, last.clamp(max=rows.shape[0] - 1))
