"""A scan whose backward completes the gradient of the first input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexsn_runtime.kernels._autograd import run_trained
from flexsn_runtime.kernels._scan import prepared_scans
from flexsn_runtime.kernels._trained import TrainedScan
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.native import LastLaunch
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._completion import Completion, completed_gradient
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import remember, repeated_scan
from flexsn_runtime.recurrent._staged_autograd import scan
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization


class CompletedScan(TrainedScan):
    """A `TrainedScan`, and a kernel behind its backward.

    Args:
        step, arguments, wanted, state_seqs: as of `TrainedScan`.
        completion: of calls of this layout.
        places: of each tensor that `completion` counts, where it is among those of a call.
    """

    def __init__(
        self,
        step: Specialization,
        arguments: Arguments,
        wanted: tuple[bool, ...],
        completion: Completion,
        places: Sequence[int],
        *,
        state_seqs: bool,
    ) -> None:
        self._others = [places[i] for i in completion.others]
        self._constants = [places[i] for i in completion.constants]
        self._formula, self._more = completion.formula, completion.more
        super().__init__(step, arguments, self._computed(wanted), state_seqs=state_seqs)

    def _computed(self, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        if not needed[0]:
            return needed
        return tuple([need or i in self._others for i, need in enumerate(needed)])

    def _finished(
        self, gradients: list[Tensor | None], tensors: Sequence[Tensor | None], needed: tuple[bool, ...]
    ) -> list[Tensor | None]:
        if not needed[0]:
            return gradients
        x, read = self._read(tensors)
        of_others = [gradients[i] for i in self._others]
        completed = completed_gradient(self._formula, gradients[0], x, read, of_others)
        return [completed, *(g if need else None for g, need in zip(gradients[1:], needed[1:], strict=True))]

    def _last(
        self, gradients: list[Tensor | None], tensors: Sequence[Tensor | None], needed: tuple[bool, ...]
    ) -> tuple[LastLaunch, ...] | None:
        if not needed[0]:
            return ()
        x, read = self._read(tensors)
        gradient, *of_others = (gradients[i] for i in (0, *self._others))
        there = [one for one in of_others if one is not None]
        if gradient is None or len(there) < len(of_others):
            return None
        launch = self._formula.by_address(gradient, x, [*read, *there])
        if launch is None:
            return None
        first = len(tensors)
        more = range(first + len(needed), first + len(needed) + len(self._more))
        # Where what the kernel takes and writes is in `[*tensors, *gradients, *more, written]`.
        places = [first, 0, *self._others, *self._constants, *more, *(first + i for i in self._others), more.stop]
        by_address = ByAddress(launch.entry, tuple(places[i] for i in launch.places), launch.written)
        return (LastLaunch(by_address, self._more),)

    def _read(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """The first input, and what the formula takes besides gradients."""
        x, *read = (tensors[i] for i in (0, *self._others, *self._constants))
        there = [one for one in read if one is not None]
        assert x is not None
        assert len(there) == len(read)
        return x, [*there, *self._more]


def completed_scan(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor],
    completion: Completion,
    *,
    state_seqs: bool,
) -> Sequence[Tensor]:
    """As `prepare` and `scan`, where more flows to the first input than through the scan.

    What autograd saves does not depend on earlier calls: checkpointing compares that of two.

    Args:
        inputs: the first one requires grad.
        instead: as for `prepare`; in the order in which `completion` counts.

    Raises:
        As `prepare`.
    """
    formula = completion.formula
    if not state_seqs:
        results = repeated_scan(program, inputs, states, instead, formula)
        if results is not None:
            return results
    step, arguments = prepare(program, (*inputs, *states), instead=instead)
    if not arguments.inputs[0].requires_grad or not torch.is_grad_enabled():
        return scan(step, arguments, state_seqs=state_seqs)
    if not isinstance(step, Specialization):
        x, stand_ins = completion.joined(inputs[0], list(instead.values()))
        joined = dict(zip(instead, stand_ins, strict=True))
        step, arguments = prepare(program, (x, *inputs[1:], *states), instead=joined)
        return scan(step, arguments, state_seqs=state_seqs)
    places = _places(step, instead)
    wanted = tuple([t is not None and t.requires_grad for t in arguments.all])
    prepared = prepared_scans(step, arguments)
    key = "completed", formula, wanted, state_seqs
    completed: CompletedScan | None = prepared.get(key)
    if completed is None:
        completed = CompletedScan(step, arguments, wanted, completion, places, state_seqs=state_seqs)
        prepared[key] = completed
    results = run_trained(completed, arguments.all)
    if not state_seqs:
        remember(program, inputs, states, step, arguments, instead=instead, formula=formula, completed=completed)
    return results


def _places(step: CoreSpecialization, instead: Mapping[int, Tensor]) -> list[int]:
    """Where what stands for tensors of `instead` is among the tensors of a call."""
    captured = step.captured()
    assert captured is not None, "they have just been read"
    first = step.trace.num_inputs + step.trace.num_states
    there = {id(tensor): first + i for i, tensor in enumerate(captured)}
    return [there[stand_in] for stand_in in instead]
