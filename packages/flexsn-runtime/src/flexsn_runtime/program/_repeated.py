"""Repeats an earlier call: looks up a call of the same kind, and compares everything that may have changed since."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import (
    alike,
    are_transforms_active,
    forward_level,
    is_any_autocast,
    never,
    number_of_modes,
    tracing_state,
    transform_at_work,
)
from flexsn_runtime.calls._plan import Plan
from flexsn_runtime.kernels._autograd import TrainedRun, scan_pointwise
from flexsn_runtime.kernels._scan import forward_scan
from flexsn_runtime.kernels._trained import Compute, TrainedScan, trained_scan
from flexsn_runtime.native import Again, RepeatedFunction, may_launch
from flexsn_runtime.operands._operands import Arguments, layout_key, same_layout
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._autocast import autocast_now
from flexsn_runtime.program._cut_step import CutSpecialization
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.recurrent._calls import staged_call
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization

Run = Callable[[Sequence[Tensor | None]], Sequence[Any]]

# Maximum number of layouts that are stored for one kind of call.
_MOST = 8


@dataclass(slots=True)
class RepeatedCall:
    """A call that later calls may repeat: everything on which it depends, and the function that runs repeated calls.

    A program stores this object under the kind of the call; see `find_call`.

    Attributes:
        layout: layout of inputs and states and, in grad mode, the `requires_grad` flags of these tensors and of the
            replacements of captured tensors.
        lifted: layout of the captured tensors.
        captures: True if there are captured tensors.
        at_zero: one `None` for each state if calls pass no states, which are then zeros; otherwise empty.
        run: function of `[*inputs, *states, *lifted]`.
        has_layout: predicate that is True if `[*inputs, *states, *lifted]`, without `at_zero`, have the layout of these
            calls. The predicate may wrongly return False.
        are_alike: predicate like `has_layout` that compares no addresses. It suffices if all tensors are aligned.
        are_aligned: True if the address of each tensor is a multiple of 16 bytes, and not 0.
    """

    step: CoreSpecialization
    layout: Hashable
    lifted: tuple[object, ...]
    captures: bool
    at_zero: tuple[None, ...]
    run: Run
    has_layout: Callable[[Sequence[Tensor]], bool]
    are_alike: Callable[..., bool]
    are_aligned: bool
    _agains: dict[Hashable, Again | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: CoreSpecialization,
        layout: Hashable,
        given: Sequence[Tensor],
        lifted: Sequence[Tensor],
        at_zero: tuple[None, ...],
        run: Run,
    ) -> RepeatedCall:
        """Returns a call on tensors of this layout, which `repeated_call` can repeat."""
        captures = bool(lifted) or step.trace.reads.fetch() != ()
        call = cls(step, layout, layout_key(lifted), captures, at_zero, run, never, never, False)
        call.expect((*given, *lifted))
        return call

    def places(self, instead: Mapping[int, Tensor]) -> list[int] | None:
        """Returns the positions of the tensors of `instead` among the tensors of `run`.

        The result is `None` unless `instead` replaces exactly the captured tensors.
        """
        captured, first = self.step.captured(), self.step.trace.num_inputs + self.step.trace.num_states
        if captured is None or len(captured) != len(instead):
            return None
        place_by_id = {id(tensor): first + i for i, tensor in enumerate(captured)}
        places = [place_by_id[stand_in] for stand_in in instead if stand_in in place_by_id]
        return places if len(places) == len(instead) else None

    def again(self, key: Hashable, tensors: Sequence[Tensor | None], compute: Compute | None = None) -> Again | None:
        """Returns a function that runs calls like this one without Python; `None` if the launcher cannot run them.

        Requires `run.is_native`. The function checks everything on which a call depends, except the values that the
        core reads (`Reads.holds`) and launch hooks (`run.watched`). The caller must check these values and hooks.

        Args:
            key: value that is equal for arguments that differ only in the contents of memory.
            tensors: `[*inputs, *states, *lifted]`; with `compute`, same as for `TrainedScan.computing`.
            compute: same as for `TrainedScan.computing`; `None` if no tensor is computed.
        """
        run, key = self.run, (key, torch.is_inference_mode_enabled())
        if key in self._agains or transform_at_work() is not None or number_of_modes() or _is_capturing(tensors[0]):
            return self._agains.get(key)
        if isinstance(run, TrainedRun | RepeatedFunction) and compute is None:
            self._agains[key] = run.again(tensors)
        elif isinstance(run, TrainedRun) and isinstance(run.scan, TrainedScan) and compute is not None:
            self._agains[key] = run.scan.computing(compute, tensors)
        return self._agains.get(key)

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Stores the layout of these tensors for later comparisons."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.has_layout, self.are_alike = same_layout(tensors), alike(tensors)
        self.are_aligned = all(addresses) and all(address % 16 == 0 for address in addresses)


def repeated_call(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
    *,
    single: bool = False,
    state_seqs: bool = False,
) -> Sequence[Tensor] | None:
    """Returns the results of a call if the program has run a similar call; otherwise `None`.

    The earlier call has passed all checks of `prepare` and `scan`. This function compares everything on which these
    checks depend: the kind of call, the layout of all tensors, the values that the core reads, gradients, autocast and
    transforms.

    Args:
        inputs: `[T, *step]` each, or sequences whose steps broadcast to `[*step]`. If `single` is True, the inputs lack
            the dimension T.
        states: initial states `[*step]`; empty for zeros.
        instead: same as for `prepare`.
        formula: formula that completes the gradient of the first input.
        single: True for one step without a time dimension.
        state_seqs: True to return the states after every step, False to return only the final states.
    """
    call = find_call(program, inputs, states, instead, formula, single=single, state_seqs=state_seqs)
    return None if call is None else call[0].run(call[1])


def find_call(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
    *,
    single: bool = False,
    state_seqs: bool = False,
) -> tuple[RepeatedCall, tuple[Tensor | None, ...]] | None:
    """Returns the call that `repeated_call` repeats, and the tensors to run it on; `None` without such a call."""
    autocast = _find_autocast(inputs) if is_any_autocast() else None
    primals = (*inputs, *states)
    try:
        grad, shape = torch.is_grad_enabled(), inputs[0].shape
        kind = (single, state_seqs, len(inputs), len(states), grad, autocast, formula, shape)
        if program.requires_grad is not None:
            primals = program.masked(primals)
    except (AttributeError, IndexError):  # an argument is absent or not a tensor
        return None
    calls: tuple[RepeatedCall, ...] | None = program.plans.get(kind)
    if calls is None:
        return None
    for call in calls:
        if call.captures or not call.step.trace.reads.holds():
            lifted = call.step.captured(instead)
            if lifted is None:
                continue
        else:
            lifted = ()
        tensors = (*primals, *lifted)
        if call.are_aligned:  # like `has_layout`, without calls of Python functions
            addresses = [*map(Tensor.data_ptr, tensors)] if call.are_alike(*tensors) else ()
            if not addresses or not all(addresses) or reduce(or_, addresses) % 16:
                continue
        elif not call.has_layout(tensors):
            continue
        may_transform = (
            are_transforms_active() or number_of_modes() or tracing_state() is not None or forward_level() >= 0
        )
        if may_transform and transform_at_work() is not None:
            return None
        return call, (*primals, *call.at_zero, *lifted)
    return _find_call_by_key(program, kind, primals, instead)


def _find_call_by_key(
    program: ScanProgram, kind: Hashable, primals: Sequence[Tensor], instead: Mapping[int, Tensor] | None
) -> tuple[RepeatedCall, tuple[Tensor | None, ...]] | None:
    """Finds the call that `find_call` returns, by slower comparisons than those of `alike`.

    Unlike `alike`, these comparisons accept instances of subclasses, and a changed state of the dispatcher.
    """
    try:
        layout = _describe_layout(primals, instead)
    except (AttributeError, RuntimeError):  # an argument is not a tensor, or has no memory
        return None
    calls: tuple[RepeatedCall, ...] = program.plans.get(kind, ())
    match = next((call for call in calls if call.layout == layout), None)
    if match is None or transform_at_work() is not None:
        return None
    lifted = match.step.captured(instead)
    if lifted is None or layout_key(lifted) != match.lifted:
        return None
    match.expect((*primals, *lifted))
    program.plans[kind] = (match, *[call for call in calls if call is not match])
    return match, (*primals, *match.at_zero, *lifted)


def repeated_scan(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
) -> Sequence[Tensor] | None:
    """Returns `(*output_seqs, *final_states)` of `repeated_call`."""
    return repeated_call(program, inputs, states, instead, formula)


def repeated_step(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Returns the results of `single_step` without gradients, if a similar step has run; otherwise `None`.

    Such a step is launched directly: the checks and allocations of a scan of one step take longer than its kernel.
    """
    return repeated_call(program, inputs, states, single=True)


def scan_again(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Repeats an earlier call if one matches. Otherwise, prepares, runs and stores the call.

    Returns `(*output_seqs, *final_states)`.

    Raises:
        The errors of `prepare`.
    """
    return run_program(program, inputs, states, instead)


def run_program(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
    *,
    state_seqs: bool = False,
) -> tuple[Tensor, ...]:
    """Runs a program as `scan_again` does. If `state_seqs` is True, returns the states after every step."""
    results = repeated_call(program, inputs, states, instead, state_seqs=state_seqs)
    if results is not None:
        return tuple(results)
    step, arguments = prepare(program, (*inputs, *states), instead=instead)
    results = scan(step, arguments, state_seqs=state_seqs)
    run = _make_run(step, arguments, state_seqs)
    note(program, inputs, states, step, arguments, run, instead=instead, state_seqs=state_seqs)
    return results


def remember(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    step: CoreSpecialization,
    arguments: Arguments,
    *,
    instead: Mapping[int, Tensor] | None = None,
    single: bool = False,
    formula: object = None,
    completed: TrainedScan | None = None,
) -> None:
    """Stores a call so that later calls can repeat it, unless its conditions may change without being noticed.

    Args:
        inputs, states: the call's inputs and states.
        step, arguments: the step that ran, and its arguments.
        instead: same as for `prepare`.
        single: True for a single step without a time dimension.
        formula, completed: formula that completes the gradient of the first input, and scan that applies it.
    """
    run = _make_run(step, arguments, False) if completed is None else TrainedRun(completed)
    if single and isinstance(step, Specialization) and not _is_training(arguments):
        plan = forward_scan(step, arguments, state_seqs=False, training=False).single
        run = _choose_executor(plan)
    elif single:
        run = partial(_run_single, step, run)
    note(program, inputs, states, step, arguments, run, instead=instead, single=single, formula=formula)


def note(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    step: CoreSpecialization,
    arguments: Arguments,
    run: Run,
    *,
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
    single: bool = False,
    state_seqs: bool = False,
) -> None:
    """Stores a call for later calls, as `remember` does, together with the function `run` that repeats the call.

    Args:
        run: function of `[*inputs, *states, *lifted]`.
        single, state_seqs: same as for `repeated_call`.
    """
    primals = program.masked((*inputs, *states))
    if any(t.is_neg() for t in primals) or step.trace.reads.derived:  # the core sets attributes at each call
        return
    autocast = _find_autocast(inputs) if is_any_autocast() else None
    grad, shape = torch.is_grad_enabled(), inputs[0].shape
    kind = (single, state_seqs, len(inputs), len(states), grad, autocast, formula, shape)
    layout, lifted = _describe_layout(primals, instead), arguments.lifted
    at_zero = (None,) * (len(arguments.states) if not states else 0)
    call = RepeatedCall.of(step, layout, primals, lifted, at_zero, run)
    others = [other for other in program.plans.get(kind, ()) if other.layout != layout]
    program.plans[kind] = (call, *others[: _MOST - 1])


def scan(step: CoreSpecialization, arguments: Arguments, *, state_seqs: bool) -> tuple[Tensor, ...]:
    """Returns `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if necessary."""
    if arguments.num_steps == 0:  # as in a loop, results depend only on the initial states
        detached, lifted = (tuple([t.detach() for t in tensors]) for tensors in (arguments.inputs, arguments.lifted))
        arguments = arguments._replace(inputs=detached, lifted=lifted)
    if isinstance(step, RecurrentSpecialization):
        return staged_call(step, arguments, state_seqs=state_seqs)(arguments.all)
    if not isinstance(step, CutSpecialization):
        assert isinstance(step, Specialization)
        return scan_pointwise(step, arguments, state_seqs=state_seqs)
    inputs, states = step.split(arguments)
    results = run_program(step.program, inputs, states, step.instead(arguments), state_seqs=state_seqs)
    return step.join(results, state_seqs=state_seqs)


def _make_run(step: CoreSpecialization, arguments: Arguments, state_seqs: bool) -> Run:
    """Returns the function that repeats a call of a step."""
    if isinstance(step, CutSpecialization) or arguments.num_steps == 0:
        return partial(_run_scan, step, state_seqs)
    if isinstance(step, RecurrentSpecialization):
        return staged_call(step, arguments, state_seqs=state_seqs)
    assert isinstance(step, Specialization)
    if _is_training(arguments):
        needs_grad = tuple([t is not None and t.requires_grad for t in arguments.all])
        return TrainedRun(trained_scan(step, arguments, needs_grad, state_seqs=state_seqs))
    plan = forward_scan(step, arguments, state_seqs=state_seqs, training=False).plan
    return _choose_executor(plan)


def _choose_executor(plan: Plan) -> Run:
    """Returns the fastest executor of a plan without gradients."""
    return RepeatedFunction(plan.run, alike=True) if may_launch(plan.device) else plan.run


def _run_scan(step: CoreSpecialization, state_seqs: bool, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    trace = step.trace
    arguments = Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values))
    return scan(step, arguments, state_seqs=state_seqs)


def _run_single(step: CoreSpecialization, run: Run, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs one step as a sequence of length 1."""
    count, outputs = step.trace.num_inputs, step.trace.num_outputs
    results = run((*[None if x is None else x.unsqueeze(0) for x in tensors[:count]], *tensors[count:]))
    return [*[output.squeeze(0) for output in results[:outputs]], *results[outputs:]]


def _is_capturing(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_training(arguments: Arguments) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments.all)


def _find_autocast(inputs: Sequence[Tensor]) -> torch.dtype | None:
    """Returns the dtype of autocast, which `alike` does not compare."""
    device = getattr(inputs[0], "device", None) if inputs else None
    return autocast_now(device) if isinstance(device, torch.device) else None


def _describe_layout(primals: Sequence[Tensor], instead: Mapping[int, Tensor] | None) -> Hashable:
    # The `requires_grad` flags of captured tensors are compared separately.
    grads = None
    if torch.is_grad_enabled():
        grads = tuple([t.requires_grad for t in (primals if instead is None else (*primals, *instead.values()))])
    return grads, layout_key(primals)
