"""Runs a scan with PyTorch's own control-flow operators, ``scan`` and ``while_loop``, for comparison.

Both operators silently compute wrong gradients in some cases (see `flexsn_hop.lowerable_scan`). Calls in these cases
raise an error. Neither operator accepts results that are aliases or unchanged arguments, so this module copies all
results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexsn_hop._torch_private import builtin_scan, builtin_while_loop
from flexsn_hop.errors import LoweringError, LoweringGradientError
from flexsn_hop.formats import copy_in_order, sequence_order, state_order
from flexsn_hop.loop._arguments import ScanCall, check_call
from flexsn_hop.loop._eager import check_step, contiguous_copy, empty_scan

__all__ = ["through_scan", "through_while_loop"]


def through_scan(call: ScanCall) -> tuple[torch.Tensor, ...]:
    """Runs the scan with torch's ``scan``. For the lowering ``"scan"``, Dynamo traces this function."""
    if builtin_scan is None:
        raise LoweringError(f"torch {torch.__version__} has no scan operator; use another lowering")
    _check(call)
    if call.steps == 0:
        return empty_scan(call)
    layout, (inputs, states, lifted) = call.layout, call.split()
    # The operator needs at least one carried value. The strides of a carried value must not change in a step.
    carried = [state.contiguous() for state in states] or [inputs[0].new_zeros(())]

    def combine(carry: list[torch.Tensor], slices: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        before = carry[: layout.num_states]
        outputs, new_states = check_step(call.core(*slices, *before, *lifted), before, layout.num_outputs, step=0)
        sequence_values = outputs if layout.final_state else (*outputs, *new_states)
        # All results are copies, because the operator rejects results that alias an argument or another result.
        next_carry = [contiguous_copy(state) for state in new_states] or [carry[0].clone()]
        return next_carry, [contiguous_copy(value) for value in sequence_values]

    last, sequences = builtin_scan(combine, carried, list(inputs))
    results = _convert_formats(call, sequences, last[: layout.num_states] if layout.final_state else ())
    if any(result.requires_grad for result in results) and not all(
        state.requires_grad for state in carried if state.dtype.is_floating_point
    ):
        raise LoweringGradientError(
            "the built-in scan may compute wrong gradients if a floating initial state does not "
            "require grad: let the initial states require grad, run under torch.no_grad(), or use "
            "flex_sn_scan with another lowering"
        )
    return results


def through_while_loop(call: ScanCall) -> tuple[torch.Tensor, ...]:
    """Runs the scan with torch's ``while_loop``. For the lowering ``"while_loop"``, Dynamo traces this function."""
    if builtin_while_loop is None:
        raise LoweringError(f"torch {torch.__version__} has no while_loop operator; use another lowering")
    _check(call)
    steps = call.steps
    if steps == 0:
        return empty_scan(call)
    layout, (inputs, states, lifted) = call.layout, call.split()

    def step_results(
        slices: list[torch.Tensor], before: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns copies of the new states, and of the values that are written to the sequences."""
        outputs, new_states = check_step(call.core(*slices, *before, *lifted), before, layout.num_outputs, step=0)
        sequence_values = outputs if layout.final_state else (*outputs, *new_states)
        return [contiguous_copy(state) for state in new_states], [contiguous_copy(value) for value in sequence_values]

    first_states, first = step_results([sequence[0] for sequence in inputs], states)
    if any(value.requires_grad for value in (*first_states, *first)):
        raise LoweringGradientError(
            "the built-in while_loop may compute wrong gradients: run under torch.no_grad(), or "
            "use flex_sn_scan with another lowering"
        )
    buffers = [value.unsqueeze(0).repeat(steps, *[1] * value.dim()) for value in first]
    step = torch.ones((), dtype=torch.int64, device=inputs[0].device)

    def unfinished(step: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return step < steps

    def body(step: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = step.reshape(1)
        slices = [sequence.index_select(0, index).squeeze(0) for sequence in inputs]
        new_states, sequence_values = step_results(slices, values[: layout.num_states])
        filled = [
            buffer.index_copy(0, index, value.unsqueeze(0))
            for buffer, value in zip(values[layout.num_states :], sequence_values, strict=True)
        ]
        return (step + 1, *new_states, *filled)

    results = builtin_while_loop(unfinished, body, (step, *first_states, *buffers))
    last, sequences = results[1 : 1 + layout.num_states], results[1 + layout.num_states :]
    return _convert_formats(call, sequences, last if layout.final_state else ())


def _convert_formats(
    call: ScanCall, sequences: Sequence[torch.Tensor], finals: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Converts the operators' contiguous results to the memory formats of the eager scan."""
    inputs, states, _ = call.split()
    orders = [sequence_order(sequence.shape[1:], inputs, states) for sequence in sequences]
    orders += [state_order(final.shape, inputs, states) for final in finals]
    return tuple(
        value if order == tuple(range(value.dim())) else copy_in_order(value, order)
        for value, order in zip((*sequences, *finals), orders, strict=True)
    )


def _check(call: ScanCall) -> None:
    """Checks the arguments like the eager scan, unless Dynamo traces this function.

    Dynamo cannot trace the checks, and the operator has already checked the arguments before Dynamo traces.
    """
    if not torch.compiler.is_compiling():
        check_call(call)
