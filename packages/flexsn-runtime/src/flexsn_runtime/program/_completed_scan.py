"""A scan whose backward completes the gradient of the first input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flexsn_runtime.calls._plan import Memory, PlanStep
from flexsn_runtime.calls._recorded import same_in_each_call
from flexsn_runtime.kernels._autograd import TrainedRun, run_trained
from flexsn_runtime.kernels._trained import TrainedScan
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._completion import Completion, completed_gradient
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import note, repeated_call, scan
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization


class CompletingStep:
    """A `LastStep` of a backward. It completes the gradient of the first input.

    Args:
        completion: the completion for calls of this layout.
        places: for each tensor in the argument `instead` of `prepare`, its position among the tensors of a call.
    """

    def __init__(self, completion: Completion, places: Sequence[int]) -> None:
        self.others: Sequence[int] = [places[i] for i in completion.others]
        self._constants = [places[i] for i in completion.constants]
        self._formula, self._more = completion.formula, completion.more

    def at(self, first: int) -> PlanStep:
        return partial(self._complete, first)

    def _complete(self, first: int, memory: Memory) -> None:
        x, operands = self._read(memory)
        of_others = [memory[first + i] for i in self.others]
        memory[first] = completed_gradient(self._formula, memory[first], x, operands, of_others)

    def _read(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Returns the first input, and all arguments of the formula except gradients."""
        x, *operands = (tensors[i] for i in (0, *self.others, *self._constants))
        present = [operand for operand in operands if operand is not None]
        assert x is not None
        assert len(present) == len(operands)
        return x, [*present, *map(same_in_each_call, self._more)]


def completed_scan(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor],
    completion: Completion,
    *,
    state_seqs: bool,
) -> Sequence[Tensor]:
    """Prepares and runs a scan through which only a part of the gradient of the first input flows.

    The backward completes this gradient.

    Autograd saves the same tensors in the first call and in repeated calls, because activation checkpointing compares
    the tensors that two calls save.

    Args:
        inputs: input sequences. The gradient of the first input is completed if this input requires grad.
        instead: same as for `prepare`. The positions in `completion` refer to the order of these tensors.

    Raises:
        The errors of `prepare`.
    """
    formula = completion.formula
    results = repeated_call(program, inputs, states, instead, formula, state_seqs=state_seqs)
    if results is not None:
        return results
    step, arguments = prepare(program, (*inputs, *states), instead=instead)
    if not arguments.inputs[0].requires_grad or not torch.is_grad_enabled():
        return scan(step, arguments, state_seqs=state_seqs)
    if not isinstance(step, Specialization):
        x, stand_ins = completion.joined(inputs[0], list(instead.values()))
        replacements = dict(zip(instead, stand_ins, strict=True))
        step, arguments = prepare(program, (x, *inputs[1:], *states), instead=replacements)
        return scan(step, arguments, state_seqs=state_seqs)
    places = _find_places(step, instead)
    needs_grad = tuple([t is not None and t.requires_grad for t in arguments.all])
    trained_scan = TrainedScan(
        step, arguments, needs_grad, state_seqs=state_seqs, last=CompletingStep(completion, places)
    )
    results = run_trained(trained_scan, arguments.all)
    run = TrainedRun(trained_scan)
    note(program, inputs, states, step, arguments, run, instead=instead, state_seqs=state_seqs, formula=formula)
    return results


def _find_places(step: CoreSpecialization, instead: Mapping[int, Tensor]) -> list[int]:
    """Returns the position of each tensor of `instead` among the tensors of a call."""
    captured = step.captured()
    assert captured is not None, "the captured tensors have just been read"
    first = step.trace.num_inputs + step.trace.num_states
    place_by_id = {id(tensor): first + i for i, tensor in enumerate(captured)}
    return [place_by_id[stand_in] for stand_in in instead]
