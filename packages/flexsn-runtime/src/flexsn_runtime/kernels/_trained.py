"""A scan whose gradients are asked for, prepared once: what a training step asks is asked before it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import is_batched, transform_at_work, untraced
from flexsn_runtime.kernels._ahead import compiling_backward
from flexsn_runtime.kernels._backward import BackwardScan
from flexsn_runtime.kernels._refused import refuse_double_backward, several_at_once
from flexsn_runtime.kernels._scan import backward_scan, forward_scan, prepared_scans
from flexsn_runtime.native import LastLaunch, NativeScan, compiled_launcher
from flexsn_runtime.operands._operands import Arguments, same_layout
from flexsn_runtime.segments._choice import choose_segments
from flexsn_runtime.step._pointwise_step import Specialization

# As many as the compiled launcher knows at a time.
_MOST_CONSIDERED = 4
# Backward passes between two questions whether it is there: they take longer than what is asked.
_ASKED_EVERY = 64


class TrainedScan:
    """A forward scan over arguments of one layout, and the backward scans that follow it.

    Args:
        arguments: any that have the layout.
        wanted: for each of `[*inputs, *states, *lifted]`, whether it requires grad.
        state_seqs: as for `forward_scan`.

    Attributes:
        first_kept: where in the result of `run` begins what is for the backward.
        first_bits: where before that begin the bits of outputs; no gradient comes to those.
        fixed: which of the results before `first_kept` no gradient flows through.
        native: what runs it without Python, once the compiled launcher is there and a backward was run.
    """

    def __init__(
        self, step: Specialization, arguments: Arguments, wanted: tuple[bool, ...], *, state_seqs: bool
    ) -> None:
        self.step = step
        self._wanted, self._state_seqs = wanted, state_seqs
        self._residuals = step.residuals(wanted)
        self.forward = forward_scan(step, arguments, state_seqs=state_seqs, training=True, residuals=self._residuals)
        self.first_kept = self.forward.first_kept
        flows = differentiable_results(step, arguments.num_steps, state_seqs=state_seqs)
        self.first_bits = self.forward.first_bits
        bits = range(self.first_bits, self.first_kept)
        self.fixed = (*(i for i, one in enumerate(flows) if not one), *bits)
        # The backward scan that ran last, and for what. In one object: threads may share this.
        self._latest: tuple[tuple[bool, ...], Callable[[Sequence[Tensor | None]], bool], BackwardScan] | None = None
        self.native: NativeScan | None = None
        self._there = [t is not None for t in arguments.all]
        self._device = arguments.device
        # Of late, for the compiled launcher.
        self._considered: list[tuple[BackwardScan, tuple[bool, ...]]] = []
        self._backwards = 0

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Scans `[*inputs, *states, *lifted]` forward; as `ForwardScan.run`."""
        trace = self.step.trace
        arguments = Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values))
        with compiling_backward(
            self.forward,
            self.step,
            arguments,
            self._wanted,
            state_seqs=self._state_seqs,
            residuals=self._residuals,
        ):
            written = self.forward.run(tensors)
        self.run = self.forward.run  # type: ignore[method-assign, assignment]  # nothing is to be compiled any more
        return written

    def reads_hold(self) -> bool:
        """Whether what backward formulas read is there still."""
        return self.step.trace.reads.holds_for_backward()

    def gradients(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
        """Scans backward; of each that is needed its gradient, where one flows.

        Args:
            tensors: `[*inputs, *states, *lifted, *checkpoints or *residuals, *grad_outputs, *grad_states]`.
            needed: for each of `[*inputs, *states, *lifted]`, whether its gradient is asked for.

        Raises:
            TransformError: several gradients come at once.
        """
        if not self.reads_hold():
            self.step.check_backward()
        needed = tuple(needed)
        try:
            backward = self._backward(tensors, self._computed(needed))
        except RuntimeError:
            if not any(map(is_batched, tensors)):
                raise
            raise several_at_once() from None
        if torch.is_grad_enabled():  # `create_graph`
            with torch.no_grad():
                found = backward.gradients(tensors)
            return self._finished(refuse_double_backward(found, tensors), tensors, needed)
        found = backward.gradients(tensors)
        finished = self._finished(found, tensors, needed)
        self._backwards += 1
        is_known = (backward, needed) in self._considered
        if not is_known and (self.native is not None or self._backwards % _ASKED_EVERY == 1):
            self._hand_over(tensors, needed, backward, found)
        return finished

    # -- for scans that do more in their backward ------------------------------------------------------------------

    def _computed(self, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which gradients the backward scan computes for those that are needed."""
        return needed

    def _finished(
        self, gradients: list[Tensor | None], tensors: Sequence[Tensor | None], needed: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """What comes of the gradients that were computed, which stay as they are."""
        return gradients

    def _last(
        self, gradients: list[Tensor | None], tensors: Sequence[Tensor | None], needed: tuple[bool, ...]
    ) -> tuple[LastLaunch, ...] | None:
        """What `_finished` has launched; `None`: something that has no address."""
        return ()

    # -- preparation -----------------------------------------------------------------------------------------------

    def _backward(self, tensors: Sequence[Tensor | None], computed: tuple[bool, ...]) -> BackwardScan:
        """What scans backward over these."""
        latest = self._latest
        if latest is not None and computed == latest[0] and latest[1](tensors) and transform_at_work() is None:
            return latest[2]
        scan = backward_scan(self.step, tensors, computed, state_seqs=self._state_seqs, residuals=self._residuals)
        self._latest = computed, same_layout(tensors), scan
        return scan

    def _hand_over(
        self,
        tensors: Sequence[Tensor | None],
        needed: tuple[bool, ...],
        backward: BackwardScan,
        gradients: list[Tensor | None],
    ) -> None:
        """From now on, the compiled launcher makes calls like this one, if it is there and can."""
        module = compiled_launcher(self._device, self._backwards)
        if module is None:
            return
        self._considered = [(backward, needed), *self._considered[: _MOST_CONSIDERED - 1]]
        last = self._last(gradients, tensors, needed)
        with untraced():  # nobody's mode has to know
            forward_launch, backward_launch = self.forward.by_address(), backward.by_address()
            if forward_launch is None or backward_launch is None or last is None:
                return
            sums = backward.plain_sums(tensors)
            if sums is None:
                return
            native = self.native or NativeScan(
                module,
                self,
                self.step.trace.core,
                self._there,
                forward_launch,
                first_bits=self.first_bits,
                first_kept=self.first_kept,
                fixed=self.fixed,
            )
            asks = self.step.trace.reads.reads_for_backward
            native.follow(tensors, needed, backward_launch, backward.copies(tensors), sums, *last, asks=asks)
        self.native = native


def trained_scan(
    step: Specialization, arguments: Arguments, wanted: tuple[bool, ...], *, state_seqs: bool
) -> TrainedScan:
    """The one for arguments of this layout."""
    prepared = prepared_scans(step, arguments)
    key = "trained", wanted, state_seqs, choose_segments(step, arguments)
    found: TrainedScan | None = prepared.get(key)
    if found is None:
        found = prepared[key] = TrainedScan(step, arguments, wanted, state_seqs=state_seqs)
    return found


def differentiable_results(step: Any, num_steps: int, *, state_seqs: bool) -> tuple[bool, ...]:
    """Of which results gradients flow. Without a step, final states are the initial ones.

    Args:
        step: a `CoreSpecialization`.
    """
    differentiable: tuple[bool, ...] = step.trace.differentiable
    if num_steps == 0 and not state_seqs:
        states = (value.dtype.is_floating_point for value in step.trace.states)
        differentiable = (*differentiable[: step.trace.num_outputs], *states)
    return differentiable
