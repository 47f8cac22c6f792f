"""A scan whose gradients are asked for, prepared once: what a training step asks is asked before it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexsn_runtime._torch_private import is_batched, untraced
from flexsn_runtime.kernels._ahead import compiling_backward
from flexsn_runtime.kernels._backward import BackwardScan
from flexsn_runtime.kernels._refused import refuse_double_backward, several_at_once
from flexsn_runtime.kernels._scan import backward_scan, forward_scan, prepared_scans
from flexsn_runtime.native import LastLaunch, NativeScan, compiled_launcher
from flexsn_runtime.operands._operands import Arguments, same_layout
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
        completed: by what completes the gradient of the first input, what runs it with that.
    """

    def __init__(
        self, step: Specialization, arguments: Arguments, wanted: tuple[bool, ...], *, state_seqs: bool
    ) -> None:
        self.step = step
        self._wanted, self._state_seqs = wanted, state_seqs
        self._residuals = step.residuals(wanted)
        self.forward = forward_scan(
            step, arguments, state_seqs=state_seqs, training=True, residuals=self._residuals
        )
        self.first_kept = self.forward.first_kept
        flows = differentiable_results(step, arguments.num_steps, state_seqs=state_seqs)
        self.first_bits = self.forward.first_bits
        bits = range(self.first_bits, self.first_kept)
        self.fixed = (*(i for i, one in enumerate(flows) if not one), *bits)
        # The backward scan that ran last, and for what. In one object: threads may share this.
        self._latest: tuple[tuple[bool, ...], Callable[[Sequence[Tensor | None]], bool], BackwardScan] | None = None
        self.native: NativeScan | None = None
        self.completed: dict[Hashable, Any] = {}
        self._there = [t is not None for t in arguments.all]
        self._device = arguments.device
        self._considered = Considered()
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
            backward = self.backward(tensors, needed)
        except RuntimeError:
            if not any(map(is_batched, tensors)):
                raise
            raise several_at_once() from None
        if torch.is_grad_enabled():  # `create_graph`
            with torch.no_grad():
                found = backward.gradients(tensors)
            return refuse_double_backward(found, tensors)
        gradients = backward.gradients(tensors)
        self._backwards += 1
        if self._considered.is_new(backward) and (self.native is not None or self._backwards % _ASKED_EVERY == 1):
            self._hand_over(tensors, needed, backward)
        return gradients

    def backward(self, tensors: Sequence[Tensor | None], needed: tuple[bool, ...]) -> BackwardScan:
        """What scans backward over these."""
        latest = self._latest
        if latest is not None and needed == latest[0] and latest[1](tensors):
            return latest[2]
        scan = backward_scan(
            self.step, tensors, needed, state_seqs=self._state_seqs, residuals=self._residuals
        )
        self._latest = needed, same_layout(tensors), scan
        return scan

    def _hand_over(
        self, tensors: Sequence[Tensor | None], needed: tuple[bool, ...], backward: BackwardScan
    ) -> None:
        """From now on, the compiled launcher makes calls like this one, if it is there and can."""
        module = compiled_launcher(self._device, self._backwards)
        if module is None:
            return
        self._considered.add(backward)
        native = self.native or self.native_scan(module, self)
        if native is not None and self.tell(native, tensors, needed):
            self.native = native

    def native_scan(self, module: ModuleType, owner: Any) -> NativeScan | None:
        """The scan for the compiled launcher, which has been told no backward; `None`: it cannot launch the forward.

        Args:
            module: the compiled launcher.
            owner: as of `NativeScan`.
        """
        with untraced():  # nobody's mode has to know
            launch = self.forward.by_address()
            if launch is None:
                return None
            return NativeScan(
                module,
                owner,
                self.step.trace.core,
                self._there,
                launch,
                first_bits=self.first_bits,
                first_kept=self.first_kept,
                fixed=self.fixed,
            )

    def tell(
        self,
        native: NativeScan,
        tensors: Sequence[Tensor | None],
        needed: Sequence[bool],
        last: LastLaunch | None = None,
    ) -> bool:
        """Tells a scan of `native_scan` a backward that has run; `False`: it cannot be launched that way.

        Args:
            tensors, needed: as for `gradients`.
            last: as for `NativeScan.follow`.
        """
        backward = self.backward(tensors, tuple(needed))
        with untraced():
            launch, sums = backward.by_address(), backward.plain_sums(tensors)
            if launch is None or sums is None:
                return False
            asks = self.step.trace.reads.reads_for_backward
            native.follow(tensors, needed, launch, backward.copies(tensors), sums, asks=asks, last=last)
        return True


class Considered:
    """What the compiled launcher was told of late, or cannot be told: it is not told again."""

    def __init__(self) -> None:
        self._latest: list[object] = []

    def is_new(self, one: object) -> bool:
        """Whether it has not been considered, or long ago."""
        return not any(one is other for other in self._latest)

    def add(self, one: object) -> None:
        """Notes it."""
        self._latest = [one, *self._latest[: _MOST_CONSIDERED - 1]]


def trained_scan(
    step: Specialization, arguments: Arguments, wanted: tuple[bool, ...], *, state_seqs: bool
) -> TrainedScan:
    """The one for arguments of this layout."""
    prepared = prepared_scans(step, arguments)
    key = "trained", wanted, state_seqs
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
