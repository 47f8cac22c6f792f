"""Calls of a step with products on arguments of one layout: the first one compiles, the second one is recorded, and the
later ones repeat that. Where the loop over time is not one launch, each call finds its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import Port
from flexsn_runtime._torch_private import is_batched, transform_at_work
from flexsn_runtime.calls._recorded import Repeat, recorded
from flexsn_runtime.kernels._autograd import run_trained
from flexsn_runtime.kernels._refused import check_readable, refuse_double_backward, several_at_once
from flexsn_runtime.kernels._trained import differentiable_results
from flexsn_runtime.native import NativeScan
from flexsn_runtime.operands._operands import Arguments, layout_key, same_layout
from flexsn_runtime.recurrent._clusters import clusters_wanted
from flexsn_runtime.recurrent._one_launch import one_launch_wanted
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.recurrent._staged_autograd import backward_staged, forward_staged, without_autocast

Run = Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]

# Layouts of a backward that take turns.
_MOST_BACKWARDS = 16


def staged_call(step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool) -> Run:
    """A function for calls of `[*inputs, *states, *lifted]` like these.

    It gives `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if need be.
    """
    tensors = arguments.all
    wanted = tuple([t is not None and t.requires_grad for t in tensors]) if torch.is_grad_enabled() else ()
    trains = True in wanted
    key = trains and wanted, state_seqs, arguments.key
    run = step.calls.get(key)
    if run is None:
        if trains:
            run = partial(run_trained, TrainedStaged(step, arguments, wanted, state_seqs=state_seqs))
        else:
            run = InferredStaged(step, arguments, state_seqs=state_seqs).run
        step.calls[key] = run
    return run


@dataclass(slots=True)
class _Times:
    """How often a call of one kind ran, by what the environment says.

    Attributes:
        known: a call that ran once is `None`; one that was recorded is what repeats it, or the reason why nothing does.
    """

    known: dict[Hashable, Repeat | str | None] = field(default_factory=dict)

    def run(
        self, call: Callable[[], Sequence[Any]], given: Sequence[Tensor | None], device: torch.device, *, once: bool
    ) -> Sequence[Any]:
        """The results of the call.

        Args:
            once: it is not to be recorded.
        """
        with without_autocast(device):
            now = _environment()
            repeat = self.known.get(now)
            if callable(repeat):
                return repeat(given)
            if once or isinstance(repeat, str) or _is_capturing(device):
                return call()
            if now not in self.known:
                self.known[now] = None
                return call()
            results, self.known[now] = recorded(call, given)
            return results


class InferredStaged:
    """A scan without gradients."""

    def __init__(self, step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool) -> None:
        self._step, self._state_seqs, self._device = step, state_seqs, arguments.device
        self._once = _is_empty(step, arguments)
        self._times = _Times()

    def run(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The results, of `[*inputs, *states, *lifted]`."""
        step = self._step

        def call() -> Sequence[Tensor]:
            arguments = _arguments(step, tensors)
            return forward_staged(step, arguments, state_seqs=self._state_seqs, kept=frozenset())[0]

        with torch.no_grad():
            return tuple(self._times.run(call, tensors, self._device, once=self._once))


@dataclass(slots=True)
class _Known:
    """A backward that was run before: as `kernels._trained._Known`, with how often it ran."""

    needed: tuple[bool, ...]
    layout: tuple[object, ...]
    has_layout: Callable[[Sequence[Tensor | None]], bool]
    times: _Times


class TrainedStaged:
    """A scan with gradients, and the backwards that follow it, as `kernels._trained.TrainedScan`.

    Args:
        arguments: any that have the layout.
        wanted: for each of `[*inputs, *states, *lifted]`, whether it requires grad.

    Attributes:
        first_kept, first_bits: where in the result of `run` begins what is for the backward.
        fixed: which of the results before that no gradient flows through.
    """

    native: NativeScan | None = None

    def __init__(
        self, step: RecurrentSpecialization, arguments: Arguments, wanted: tuple[bool, ...], *, state_seqs: bool
    ) -> None:
        self.step, self._wanted, self._state_seqs, self._device = step, wanted, state_seqs, arguments.device
        self._kept = step.kept_ports(step.carrying(wanted))
        flows = differentiable_results(step, wanted, arguments.num_steps, state_seqs=state_seqs)
        self.fixed = tuple([i for i, one in enumerate(flows) if not one])
        self.first_kept = self.first_bits = len(flows)
        self._once = _is_empty(step, arguments)
        self._ports: tuple[Port, ...] = ()  # of what is kept, in order
        self._times = _Times()
        # The last ones first. Replaced as a whole: threads may share this.
        self._backwards: tuple[_Known, ...] = ()

    def run(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The results, and what is kept; of `[*inputs, *states, *lifted]`."""
        step = self.step

        def call() -> Sequence[Tensor]:
            arguments = _arguments(step, tensors)
            returned, memory = forward_staged(
                step, arguments, state_seqs=self._state_seqs, kept=self._kept, needed=self._wanted
            )
            self._ports = tuple(memory)
            return (*returned, *memory.values())

        return self._times.run(call, tensors, self._device, once=self._once)

    def gradients(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradient of each that is needed, where one flows.

        Args:
            tensors: `[*inputs, *states, *lifted, *kept, *grad_outputs, *grad_states]`.
            needed: for each of `[*inputs, *states, *lifted]`, whether its gradient is needed.

        Raises:
            TransformError: several gradients come at once.
        """
        step, wanted = self.step, tuple(needed)
        if not step.trace.reads.holds_for_backward():
            step.check_backward()
        known = self._backward(tensors, wanted)
        count, ports = len(wanted), self._ports

        def call() -> Sequence[Tensor | None]:
            arguments = _arguments(step, tensors[:count])
            behind = count + len(ports)
            kept = zip(ports, tensors[count:behind], strict=True)
            memory = {port: tensor for port, tensor in kept if tensor is not None}
            return backward_staged(
                step, arguments, memory, self._kept, tensors[behind:], wanted, state_seqs=self._state_seqs
            )

        if not torch.is_grad_enabled():
            return known.times.run(call, tensors, self._device, once=self._once)
        with torch.no_grad():
            found = known.times.run(call, tensors, self._device, once=True)
        return refuse_double_backward(list(found), tensors)

    def _backward(self, tensors: Sequence[Tensor | None], needed: tuple[bool, ...]) -> _Known:
        for known in self._backwards:
            if known.needed == needed and known.has_layout(tensors) and transform_at_work() is None:
                return known
        if any(map(is_batched, tensors)):
            raise several_at_once()
        check_readable(self.step.trace, tensors)
        layout = layout_key(tensors)
        for known in self._backwards:
            if known.needed == needed and known.layout == layout:
                known.has_layout = same_layout(tensors)
                return known
        known = _Known(needed, layout, same_layout(tensors), _Times())
        self._backwards = (known, *self._backwards[: _MOST_BACKWARDS - 1])
        return known


def _arguments(step: RecurrentSpecialization, tensors: Sequence[Tensor | None]) -> Arguments:
    trace = step.trace
    return step.counted(Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values)))


def _is_empty(step: RecurrentSpecialization, arguments: Arguments) -> bool:
    """True if nothing is launched."""
    return arguments.num_steps == 0 or 0 in step.trace.step_shape


def _environment() -> Hashable:
    """Settings that decide about a call, and are in no layout."""
    return one_launch_wanted(), clusters_wanted(), torch.get_float32_matmul_precision()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
