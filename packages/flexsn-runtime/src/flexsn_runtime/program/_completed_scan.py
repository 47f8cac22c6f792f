"""A scan and what completes the gradient of its first input, as one node of the compiled launcher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from flexsn_runtime.kernels._trained import Considered, TrainedScan
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.native import LastLaunch, compiled_launcher
from flexsn_runtime.program._completion import Completion, with_zeros
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.program._repeated import RepeatedCall, find_call, remember_like


class CompletedScan:
    """Runs calls of a trained scan without Python, and the kernel that completes the gradient behind its backward.

    Args:
        module: the compiled launcher.
        completion: of calls of one layout.
        places: where each captured tensor that `completion` counts is among the tensors of a call.
    """

    def __init__(
        self, module: ModuleType, trained: TrainedScan, completion: Completion, places: Sequence[int]
    ) -> None:
        self._trained, self._formula, self._more = trained, completion.formula, completion.more
        self._others = [places[i] for i in completion.others]
        self._constants = [places[i] for i in completion.constants]
        self._considered = Considered()
        self._native = trained.native_scan(module, self)

    def run(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
        """As `run_trained`; `None`: the compiled launcher cannot, or may not now."""
        native = self._native
        return None if native is None or native.watched() else native.run(tensors)

    def reads_hold(self) -> bool:
        """As of the trained scan."""
        return self._trained.reads_hold()

    def gradients(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        """As of the trained scan, and completed."""
        if not needed[0]:
            return self._trained.gradients(tensors, needed)
        wanted = tuple(need or i in self._others for i, need in enumerate(needed))
        found = list(self._trained.gradients(tensors, wanted))
        x = tensors[0]
        others, constants = (
            [t for i in places if (t := tensors[i]) is not None] for places in (self._others, self._constants)
        )
        assert x is not None
        gradient = torch.zeros_like(x) if found[0] is None else found[0]
        given = [*others, *constants, *self._more, *with_zeros([found[i] for i in self._others], others)]
        completed = self._formula.of(gradient, x, given)
        if wanted == tuple(needed) and None not in (found[i] for i in (0, *self._others)):
            self._tell(tensors, wanted, gradient, x, given)
        found[0] = completed
        return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]

    def _tell(
        self,
        tensors: Sequence[Tensor | None],
        needed: tuple[bool, ...],
        gradient: Tensor,
        x: Tensor,
        given: Sequence[Tensor],
    ) -> None:
        """From now on, the compiled launcher makes backward passes like this one, if it can."""
        backward = self._trained.backward(tensors, needed)
        if torch.is_grad_enabled() or self._native is None or not self._considered.is_new(backward):
            return
        self._considered.add(backward)
        launch = self._formula.by_address(gradient, x, given)
        if launch is None:
            return
        first, count = len(tensors), len(tensors) + len(needed)
        of_more = range(count, count + len(self._more))
        # Where what the kernel takes and writes is in `[*tensors, *gradients, *more, written]`.
        there = [first, 0, *self._others, *self._constants, *of_more, *(first + i for i in self._others), of_more.stop]
        places = tuple(there[i] for i in launch.places)
        last = LastLaunch(ByAddress(launch.entry, places, launch.written), self._more)
        self._trained.tell(self._native, tensors, needed, last)


def repeated_completed_scan(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor],
    completion: Completion,
) -> Sequence[Tensor] | None:
    """As `repeated_scan`, and the gradient of the first input is completed.

    Args:
        instead: as for `prepare`; in the order in which `completion` counts.
    """
    formula = completion.formula
    if completion.reduced is None:
        found = find_call(program, inputs, states, False, instead, formula)
        results = None if found is None else found[0].run(found[1])
        if results is not None:
            return results
    x, captured = completion.joined(inputs[0], [*instead.values()])
    joined = dict(zip(instead, captured, strict=True))
    found = find_call(program, (x, *inputs[1:]), states, False, joined)
    if found is None:
        return None
    call, arguments = found
    completed = None if completion.reduced is not None else _completed_scan(call, completion, instead, inputs[0])
    if completed is not None:
        remember_like(program, inputs, states, instead, formula, replace(call, run=completed.run))
    return call.run(arguments)


def _completed_scan(
    call: RepeatedCall, completion: Completion, instead: Mapping[int, Tensor], x: Tensor
) -> CompletedScan | None:
    """What runs such calls without Python; `None`: not yet, or it has been told."""
    trained = call.trained
    if trained is None or trained.native is None or completion.formula in trained.completed:
        return None
    tensors = [*instead.values()]
    if not x.requires_grad or not all(tensors[i].requires_grad for i in completion.others):
        return None  # the kernel would be told to sum up what nobody asks for
    module, captured = compiled_launcher(x.device, 0), call.step.captured()
    if module is None or captured is None:
        return None
    trace = call.step.trace
    first = trace.num_inputs + trace.num_states
    there = {id(tensor): first + i for i, tensor in enumerate(captured)}
    if any(stand_in not in there for stand_in in instead):
        return None
    completed = CompletedScan(module, trained, completion, [there[stand_in] for stand_in in instead])
    trained.completed[completion.formula] = completed
    return completed
