"""Calls of a step with products on arguments of one layout.

The first call compiles kernels, the second call is recorded, and later calls repeat the recording. If the loop over
time is not a single launch, no recording is repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexsn_graph import Port
from flexsn_runtime._float32_precision import float32_precision
from flexsn_runtime._torch_private import number_of_modes, untraced
from flexsn_runtime.calls._recorded import Recording, recorded
from flexsn_runtime.kernels._autograd import TrainedRun
from flexsn_runtime.kernels._trained import Call, PreparedBackward, Tensors, Trained, differentiable_results
from flexsn_runtime.native import NativeCall, compiled_launcher
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.recurrent._staged import RecurrentSpecialization
from flexsn_runtime.recurrent._staged_autograd import backward_staged, forward_staged, without_autocast

Run = Callable[[Tensors], tuple[Tensor, ...]]

# Number of calls between two checks whether the compiled launcher is loaded. Each check reads environment variables.
_CHECK_INTERVAL = 64
_RECORDED = 2  # number of the call that is recorded
# Environment variables that select how the loop over time runs.
_VARIABLES = ("FLEXSN_ONE_LAUNCH", "FLEXSN_CLUSTERS")


def staged_call(step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool) -> Run:
    """Returns a function that runs calls of this layout. The function takes `[*inputs, *states, *lifted]`.

    The function returns `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, differentiable if necessary.
    """
    tensors = arguments.all
    needs_grad = tuple([t is not None and t.requires_grad for t in tensors]) if torch.is_grad_enabled() else ()
    trains = True in needs_grad
    key = trains and needs_grad, state_seqs, arguments.key
    run = step.calls.get(key)
    if run is None:
        if trains:
            run = TrainedRun(TrainedStaged(step, arguments, needs_grad, state_seqs=state_seqs))
        else:
            run = InferredStaged(step, arguments, state_seqs=state_seqs).run
        step.calls[key] = run
    return run


class InferredStaged:
    """A scan of a step with products, without gradients."""

    def __init__(self, step: RecurrentSpecialization, arguments: Arguments, *, state_seqs: bool) -> None:
        self._step, self._state_seqs, self._device = step, state_seqs, arguments.device
        self._is_empty = _is_empty(step, arguments)
        self._recordings: dict[Hashable, Recording | str | None] = {}
        self._natives: dict[Hashable, NativeCall] = {}
        self._count = 0

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Returns the results for `[*inputs, *states, *lifted]`."""
        settings = environment()
        native = self._natives.get(settings)
        if native is not None and not native.watched():
            return tuple(native.run(tensors))
        self._count += 1
        with torch.no_grad():
            results = run_or_repeat(
                self._run_call, tensors, self._recordings, settings, self._device, once=self._is_empty
            )
        recording = self._recordings.get(settings)
        if recording is not None and self._count % _CHECK_INTERVAL == _RECORDED:
            module = compiled_launcher(self._device, self._count)
            with untraced():  # hides this work from all dispatch modes
                native_call = None if module is None else NativeCall.of(module, recording)
            if native_call is not None:
                self._natives[settings] = native_call
        return tuple(results)

    def _run_call(self, tensors: Tensors) -> tuple[Tensor, ...]:
        arguments = _make_arguments(self._step, tensors)
        return forward_staged(self._step, arguments, state_seqs=self._state_seqs, kept_ports=frozenset())[0]


class TrainedStaged(Trained):
    """A scan of a step with products, with gradients; see `Trained`."""

    step: RecurrentSpecialization

    def __init__(
        self, step: RecurrentSpecialization, arguments: Arguments, needs_grad: tuple[bool, ...], *, state_seqs: bool
    ) -> None:
        super().__init__(step, arguments, state_seqs=state_seqs)
        self._needs_grad = needs_grad
        self._kept = step.kept_ports(step.carrying(needs_grad))
        flows = differentiable_results(step, needs_grad, arguments.num_steps, state_seqs=state_seqs)
        self.fixed = tuple([i for i, is_differentiable in enumerate(flows) if not is_differentiable])
        self.first_kept = self.first_bits = len(flows)
        self._is_empty = _is_empty(step, arguments)
        self._ports: tuple[Port, ...] = ()  # ports of the values that `run` keeps, in order
        self._recordings: dict[Hashable, Recording | str | None] = {}

    def run(self, tensors: Tensors) -> Sequence[Tensor]:
        settings = environment()
        return run_or_repeat(self._run_forward, tensors, self._recordings, settings, self._device, once=self._is_empty)

    def _run_forward(self, tensors: Tensors) -> Sequence[Tensor]:
        arguments = _make_arguments(self.step, tensors)
        results, memory = forward_staged(
            self.step, arguments, state_seqs=self._state_seqs, kept_ports=self._kept, needs_grad=self._needs_grad
        )
        self._ports = tuple(memory)
        return (*results, *memory.values())

    def _prepare(self, tensors: Tensors, needs_grad: tuple[bool, ...]) -> Call:
        return partial(self._run_backward, needs_grad)

    def _run_backward(self, needs_grad: tuple[bool, ...], tensors: Tensors) -> Sequence[Tensor | None]:
        count, end = len(needs_grad), len(needs_grad) + len(self._ports)
        kept_tensors = zip(self._ports, tensors[count:end], strict=True)
        memory = {port: tensor for port, tensor in kept_tensors if tensor is not None}
        arguments, grads = _make_arguments(self.step, tensors[:count]), tensors[end:]
        with without_autocast(self._device):
            return backward_staged(
                self.step, arguments, memory, self._kept, grads, needs_grad, state_seqs=self._state_seqs
            )

    def _compute(self, backward: PreparedBackward, tensors: Tensors) -> Sequence[Tensor | None]:
        settings = environment()
        gradients = run_or_repeat(
            backward.call, tensors, backward.recordings, settings, self._device, once=self._is_empty
        )
        is_due = backward.recordings.get(settings) is not None and settings not in backward.registered
        if is_due and (settings in self._natives or self._count % _CHECK_INTERVAL == _RECORDED):
            module = compiled_launcher(self._device, self._count)
            if module is not None:
                self._hand_over(module, self._recordings.get(settings), backward, tensors)
        return gradients

    def _read_environment(self) -> Hashable:
        return environment()


def run_or_repeat(
    call: Callable[[Tensors], Sequence[Any]],
    tensors: Tensors,
    recordings: dict[Hashable, Recording | str | None],
    settings: Hashable,
    device: torch.device,
    *,
    once: bool,
) -> Sequence[Any]:
    """Runs a call, records it, or repeats an earlier recording. Returns the results of the call.

    Args:
        recordings: for each environment, the recording of such calls; `None` after the first call, or the reason why
            such calls cannot be repeated.
        settings: the current result of `environment`.
        once: True if the call must not be recorded.
    """
    with without_autocast(device):
        recording = recordings.get(settings)
        if isinstance(recording, Recording):
            return recording.repeat(tensors)
        if once or recording is not None or number_of_modes() or _is_capturing(device):
            return call(tensors)
        if settings not in recordings:
            recordings[settings] = None
            return call(tensors)
        results, recordings[settings] = recorded(call, tensors)
        return results


def environment() -> Hashable:
    """Returns settings that affect a call but are not part of any layout."""
    return *map(os.environ.get, _VARIABLES), float32_precision()


def _make_arguments(step: RecurrentSpecialization, tensors: Tensors) -> Arguments:
    trace = step.trace
    return step.counted(Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values)))


def _is_empty(step: RecurrentSpecialization, arguments: Arguments) -> bool:
    """True if the call launches no kernel."""
    return arguments.num_steps == 0 or 0 in step.trace.step_shape


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
