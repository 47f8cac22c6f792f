"""A call like an earlier one: what that found out is looked up, and what may have changed since is compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexsn_runtime._torch_private import is_any_autocast, never, transform_at_work
from flexsn_runtime.kernels._autograd import run_trained
from flexsn_runtime.kernels._scan import forward_scan
from flexsn_runtime.kernels._trained import TrainedScan, trained_scan
from flexsn_runtime.operands._operands import Arguments, layout_key, same_layout
from flexsn_runtime.program._arguments import prepare
from flexsn_runtime.program._autocast import autocast_now
from flexsn_runtime.program._program import ScanProgram
from flexsn_runtime.recurrent._staged_autograd import scan
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization


@dataclass(slots=True)
class RepeatedCall:
    """What runs calls of one layout.

    Attributes:
        lifted: the layout of the captured tensors.
        at_zero: what stands for the states where none are given.
        run: takes `[*inputs, *states, *lifted]`.
        has_layout: whether `[*inputs, *states, *lifted]`, without what is at zero, are as in these calls; it may say
            no, wrongly.
    """

    step: Specialization
    lifted: tuple[object, ...]
    at_zero: tuple[None, ...]
    run: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]
    has_layout: Callable[[Sequence[Tensor]], bool] = never


def repeated_scan(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
) -> Sequence[Tensor] | None:
    """`(*output_seqs, *final_states)`, if the program has run on tensors like these; else `None`.

    What `prepare` and `scan` would find in the way of a launch has been looked for then. This compares what decides
    about it: the layout of all tensors, what the core reads, gradients, autocast and transforms.

    Args:
        inputs: `[T, *step]` each, or what broadcasts to it behind T.
        states: initial states `[*step]`; none: zeros.
        instead: as for `prepare`.
        formula: what completes the gradient of the first input.
    """
    return _repeated(program, inputs, states, False, instead, formula)


def scan_again(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    instead: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """What `repeated_scan` returns, or else `prepare` and `scan`, which is remembered for the next call like this one.

    Raises:
        As `prepare`.
    """
    results = repeated_scan(program, inputs, states, instead)
    if results is not None:
        return tuple(results)
    step, arguments = prepare(program, (*inputs, *states), instead=instead)
    found = scan(step, arguments, state_seqs=False)
    remember(program, inputs, states, step, arguments, instead=instead)
    return found


def repeated_step(program: ScanProgram, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """What `single_step` returns, if it has run a step like this one, without gradients; else `None`.

    Such a step is launched as it is: what a scan of one step would ask and allocate takes longer than its kernel.
    """
    return _repeated(program, inputs, states, True)


def _repeated(
    program: ScanProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    single: bool,
    instead: Mapping[int, Tensor] | None = None,
    formula: object = None,
) -> Sequence[Tensor] | None:
    given = (*inputs, *states)
    autocast = _autocast(given)
    kind = single, len(inputs), len(states), torch.is_grad_enabled(), autocast, formula
    latest: RepeatedCall | None = program.latest_calls.get(kind)
    if latest is not None:
        lifted = latest.step.captured(instead)
        if lifted is not None and latest.has_layout((*given, *lifted)) and transform_at_work() is None:
            return latest.run((*given, *latest.at_zero, *lifted))
    try:
        key = _key(inputs, given, single, instead, autocast, formula)
        known: RepeatedCall | None = program.repeated.get(key)
    except (AttributeError, RuntimeError):  # no tensors, or without memory
        return None
    if known is None or transform_at_work() is not None:
        return None
    lifted = known.step.captured(instead)
    if lifted is None or (layout_key(lifted) if lifted else ()) != known.lifted:
        return None
    tensors = (*given, *lifted)
    if not known.has_layout(tensors):
        known.has_layout = same_layout(tensors)
    program.latest_calls[kind] = known
    return known.run((*given, *known.at_zero, *lifted))


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
    """Notes what a call has found out, for the next one like it; nothing if that cannot be told beforehand.

    Args:
        inputs, states: of the call.
        step, arguments: as it ran.
        instead: as for `prepare`.
        single: whether it was a single step, without time.
        formula, completed: what completes the gradient of the first input, and the scan that does.
    """
    given = (*inputs, *states)
    if not isinstance(step, Specialization) or program.requires_grad is not None or any(t.is_neg() for t in given):
        return
    if step.trace.reads.derived:  # the core sets attributes anew at each call
        return
    wanted = tuple(t is not None and t.requires_grad for t in arguments.all)
    run: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]
    if torch.is_grad_enabled() and any(wanted):
        if single:
            return
        run = partial(run_trained, completed or trained_scan(step, arguments, wanted, state_seqs=False))
    else:
        found = forward_scan(step, arguments, state_seqs=False, training=False)
        run = found.run_single if single else found.run
    at_zero = (None,) * (len(arguments.states) if not states else 0)
    call = RepeatedCall(step, layout_key(arguments.lifted), at_zero, run)
    program.repeated[_key(inputs, given, single, instead, _autocast(given), formula)] = call


def _autocast(given: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of autocast, which `alike` does not know."""
    if not is_any_autocast():
        return None
    device = getattr(given[0], "device", None) if given else None
    return autocast_now(device) if isinstance(device, torch.device) else None


def _key(
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    single: bool,
    instead: Mapping[int, Tensor] | None,
    autocast: torch.dtype | None,
    formula: object,
) -> Hashable:
    # Which captured tensors require grad is part of what is compared of them.
    grads = None
    if torch.is_grad_enabled():
        grads = tuple([t.requires_grad for t in (given if instead is None else (*given, *instead.values()))])
    return single, len(inputs), grads, autocast, formula, layout_key(given)
