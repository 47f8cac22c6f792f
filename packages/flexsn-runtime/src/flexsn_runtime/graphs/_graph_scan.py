"""Scans of an elementwise step that consists of graphs.

The functions run the scans, or record the scans in a compiler's graph.
"""

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
    """Describes the arguments of one step, from the arguments `[*input_seqs, *init_states, *lifted]` of the scan."""
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
    """Returns the initial states, with `None` for each state that is known to be zeros."""
    zeros = layout.zero_states or (False,) * layout.num_states
    return [None if zero else state for state, zero in zip(states, zeros, strict=True)]


def scan_forward(
    step: GraphSpecialization, layout: ScanLayout, flat_args: Sequence[Any], *, ahead: bool = False
) -> list[Tensor]:
    """Returns the results of the forward operator; see `flexsn_hop.ScanLowering`.

    Args:
        ahead: True if the program is compiled ahead of time. In this case, parallel segments of time are chosen during
            compilation.
    """
    interval, num_spare = layout.checkpoint_interval, layout.spare_checkpoints
    arguments = arguments_of(step, layout, flat_args)
    num_steps = arguments.num_steps
    has_no_checkpoints = isinstance(num_steps, int) and num_steps <= interval
    is_denser = bool(interval) and step.distance != interval
    training = interval > 0 and not (is_denser and has_no_checkpoints)
    spare_rows = _count_spare_rows(num_steps) if is_denser else num_spare
    result = _forward(
        step, arguments, state_seqs=not layout.final_state, training=training, spare_rows=spare_rows, ahead=ahead
    )
    if not is_denser:
        return [*result.returned, *result.checkpoints]
    rows = (num_steps - 1) // interval + num_spare
    if has_no_checkpoints:
        shape = step.trace.step_shape
        checkpoints = [flat_args[0].new_zeros((rows, *shape), dtype=v.dtype) for v in step.trace.states]
        return [*result.returned, *checkpoints]
    assert step.distance is not None
    return [*result.returned, *(_select_last_rows(t, interval // step.distance, rows) for t in result.checkpoints)]


def scan_backward(
    step: GraphSpecialization,
    layout: BackwardLayout,
    flat_args: Sequence[Any],
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Returns the results of the backward operator; see `flexsn_hop.ScanLowering`.

    Args:
        flat_args, saved, gradients: results of `layout.split`. The gradients of outputs precede the gradients of
            states.
    """
    scan = layout.scan
    arguments = arguments_of(step, scan, flat_args)
    if step.distance != layout.saved_interval:  # the saved states are too far apart, so the forward runs again
        spare = _count_spare_rows(arguments.num_steps)
        saved = _forward(step, arguments, state_seqs=False, training=True, spare_rows=spare).checkpoints
    present_gradients = iter(gradients)
    received = [next(present_gradients) if present else None for present in (*layout.output_grads, *layout.state_grads)]
    cotangents = split_cotangents(received, scan.num_outputs, state_seqs=not scan.final_state)
    positions = (*range(scan.num_inputs + scan.num_states), *step.lifted)
    needs_grad = [layout.needs[position] for position in positions]
    if step.is_recorded:
        computed_gradients = BackwardScan(step, arguments, saved, cotangents, needs_grad)(arguments, saved, cotangents)
    else:
        computed_gradients = run_backward(step, arguments, saved, cotangents, needs_grad)
    results = []
    for position, is_needed in enumerate(layout.needs):
        if is_needed:
            gradient = computed_gradients[positions.index(position)] if position in positions else None
            # The step does not read a lifted tensor whose position is missing in `positions`, so its gradient is zeros.
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


def _count_spare_rows(num_steps: int) -> int:
    """Returns the number of additional rows of checkpoints. If T is a symbol, two rows prevent sizes of 0 and 1."""
    return 0 if isinstance(num_steps, int) else 2


def _select_last_rows(rows: Tensor, ratio: int, count: int) -> Tensor:
    """Returns the last row of each group of `ratio` rows. Unused rows follow until there are `count` rows."""
    last = torch.arange(count, device=rows.device) * ratio + (ratio - 1)
    return rows.index_select(0, last.clamp(max=rows.shape[0] - 1))
