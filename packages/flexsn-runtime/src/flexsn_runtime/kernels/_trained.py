"""A scan with gradients that is checked and prepared once, and then repeated in each training step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from flexsn_runtime._torch_private import is_batched, number_of_modes, transform_at_work, untraced
from flexsn_runtime.calls._plan import PlanStep
from flexsn_runtime.calls._recorded import Recording, recorded
from flexsn_runtime.kernels._ahead import compiling_backward
from flexsn_runtime.kernels._refused import batched_gradients_error, check_readable, refuse_double_backward
from flexsn_runtime.kernels._scan import backward_of, forward_scan
from flexsn_runtime.native import Again, NativeScan, can_be_native, compiled_launcher, may_launch, weakly
from flexsn_runtime.operands._operands import Arguments, layout_key, same_layout
from flexsn_runtime.segments._choice import choose_segments
from flexsn_runtime.step._pointwise_step import Specialization
from flexsn_runtime.step._specialization import CoreSpecialization

# Maximum number of layouts for which a scan stores backwards. The compiled launcher has the same limit.
_MOST_BACKWARDS = 16
# Number of backwards between two checks for the compiled launcher. Each check reads environment variables.
_CHECK_INTERVAL = 64

Tensors = Sequence[Tensor | None]
Call = Callable[[Tensors], Sequence[Tensor | None]]
Compute = Callable[[Tensors], Mapping[int, Tensor]]


class LastStep(Protocol):
    """An additional last step of a backward. It replaces the gradient of the first input.

    Attributes:
        others: positions of the other tensors whose gradients this step reads.
    """

    others: Sequence[int]

    def at(self, first: int) -> PlanStep:
        """Returns the step as an operation of a plan.

        Args:
            first: position of the first gradient in memory.
        """


@dataclass(slots=True)
class PreparedBackward:
    """A backward that is prepared for tensors of one layout.

    Attributes:
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if its gradient is needed.
        layout: layout of the tensors.
        has_layout: fast predicate that is True for tensors of this layout. It may wrongly return False.
        call: function that computes the gradients.
        recordings: for each environment, the recording of the backward, without the forward, or the reason why there is
            no recording.
        registered: environments for which the backward was offered to the compiled launcher.
    """

    needs_grad: tuple[bool, ...]
    layout: tuple[object, ...]
    has_layout: Callable[[Tensors], bool]
    call: Call
    recordings: dict[Hashable, Recording | str | None] = field(default_factory=dict)
    registered: set[Hashable] = field(default_factory=set)


class Trained:
    """A scan with gradients over arguments of one layout, and its backwards.

    Args:
        arguments: any arguments of this layout.
        state_seqs: same as for `forward_scan`.

    Attributes:
        first_kept: position in the result of `run` of the first tensor that is kept for the backward.
        first_bits: position in the same result of the first bits of outputs; `first_kept` if there are no bits. Bits
            have no gradient.
        fixed: positions of the results before `first_kept` through which no gradient flows.
    """

    first_kept: int
    first_bits: int
    fixed: tuple[int, ...]

    def __init__(self, step: CoreSpecialization, arguments: Arguments, *, state_seqs: bool) -> None:
        self.step, self._state_seqs, self._device = step, state_seqs, arguments.device
        # The most recent backwards are first. Changes replace the whole tuple, because threads may share this object.
        self._backwards: tuple[PreparedBackward, ...] = ()
        # For each environment, the scan that runs without Python. It exists once the launcher is loaded and a backward
        # has run.
        self._natives: dict[Hashable, NativeScan] = {}
        self._count = 0

    @property
    def native(self) -> NativeScan | None:
        """The compiled launcher's scan, which runs without Python; `None` if no such scan is ready."""
        return self._natives.get(self._read_environment()) if self._natives else None

    def run(self, tensors: Tensors) -> Sequence[Any]:
        """Scans `[*inputs, *states, *lifted]` forward. Returns the results, then the tensors kept for the backward."""
        raise NotImplementedError

    def reads_hold(self) -> bool:
        """True if all values that backward formulas read are unchanged."""
        return self.step.trace.reads.holds_for_backward()

    def gradients(self, tensors: Tensors, needs_grad: Sequence[bool]) -> Sequence[Tensor | None]:
        """Scans backward. Returns the gradient of each tensor that needs a gradient; `None` if none flows to it.

        Args:
            tensors: `[*inputs, *states, *lifted, *kept for the backward, *grad_outputs, *grad_states]`.
            needs_grad: for each of `[*inputs, *states, *lifted]`, True if its gradient is needed.

        Raises:
            TransformError: the gradients are batched.
        """
        if not self.step.trace.reads.holds_for_backward():
            self.step.check_backward()
        try:
            backward = self._find_backward(tensors, tuple(needs_grad))
        except RuntimeError:
            if not any(map(is_batched, tensors)):
                raise
            raise batched_gradients_error() from None
        if torch.is_grad_enabled():  # `create_graph`
            with torch.no_grad():
                gradients = backward.call(tensors)
            return refuse_double_backward(list(gradients), tensors)
        if number_of_modes():  # nothing is recorded while dispatch modes are active
            return backward.call(tensors)
        self._count += 1
        return self._compute(backward, tensors)

    def _find_backward(self, tensors: Tensors, needs_grad: tuple[bool, ...]) -> PreparedBackward:
        """Returns the backward for these tensors. Prepares it if no earlier call had this layout."""
        for backward in self._backwards:
            if backward.needs_grad == needs_grad and backward.has_layout(tensors) and transform_at_work() is None:
                return backward
        if any(map(is_batched, tensors)):
            raise batched_gradients_error()
        check_readable(self.step.trace, tensors)
        layout = layout_key(tensors)
        for backward in self._backwards:
            if backward.needs_grad == needs_grad and backward.layout == layout:
                backward.has_layout = same_layout(tensors)
                return backward
        backward = PreparedBackward(needs_grad, layout, same_layout(tensors), self._prepare(tensors, needs_grad))
        self._backwards = (backward, *self._backwards[: _MOST_BACKWARDS - 1])
        return backward

    def _hand_over(
        self, module: ModuleType, forward: Recording | str | None, backward: PreparedBackward, tensors: Tensors
    ) -> None:
        """Passes calls like this one to the compiled launcher, if the launcher can execute them."""
        environment = self._read_environment()
        backward.registered.add(environment)
        with untraced():  # hides this work from all dispatch modes
            native = self._natives.get(environment)
            if native is None and isinstance(forward, Recording) and can_be_native(forward):
                native = NativeScan(
                    module,
                    weakly(self, self.step.trace.core),
                    forward,
                    first_bits=self.first_bits,
                    first_kept=self.first_kept,
                    fixed=self.fixed,
                )
            reads = self.step.trace.reads.reads_for_backward
            recording = backward.recordings.get(environment)
            if native is not None and native.follow(tensors, backward.needs_grad, recording, reads=reads):
                self._natives[environment] = native

    def _read_environment(self) -> Hashable:
        """Returns settings that affect a call but are not part of any layout."""
        return None

    def _prepare(self, tensors: Tensors, needs_grad: tuple[bool, ...]) -> Call:
        """Prepares a backward over tensors of this layout."""
        raise NotImplementedError

    def _compute(self, backward: PreparedBackward, tensors: Tensors) -> Sequence[Tensor | None]:
        """Computes the gradients of a backward. May offer the backward to the compiled launcher."""
        raise NotImplementedError


class TrainedScan(Trained):
    """A `Trained` scan that executes the plans of a pointwise step.

    Args:
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if it requires grad.
        last: additional last step of the backward, which replaces the gradient of the first input; `None` without it.
    """

    step: Specialization

    def __init__(
        self,
        step: Specialization,
        arguments: Arguments,
        needs_grad: tuple[bool, ...],
        *,
        state_seqs: bool,
        last: LastStep | None = None,
    ) -> None:
        super().__init__(step, arguments, state_seqs=state_seqs)
        self._last = last
        self._needs_grad = self._select_for_kernel(needs_grad)
        self._residuals = step.residuals(self._needs_grad)
        self._forward = forward_scan(step, arguments, state_seqs=state_seqs, training=True, residuals=self._residuals)
        self.first_kept = self._forward.first_kept
        flows = differentiable_results(step, needs_grad, arguments.num_steps, state_seqs=state_seqs)
        self.first_bits = self._forward.first_bits
        bits = range(self.first_bits, self.first_kept)
        self.fixed = (*(i for i, is_differentiable in enumerate(flows) if not is_differentiable), *bits)
        self._recording: Recording | str | None = None

    @property
    def native(self) -> NativeScan | None:
        return self._natives.get(None)

    def run(self, tensors: Tensors) -> Sequence[Any]:
        trace = self.step.trace
        arguments = Arguments.of(tensors, trace.num_inputs, trace.num_states, len(trace.lifted_values))
        with compiling_backward(
            self._forward,
            self.step,
            arguments,
            self._needs_grad,
            state_seqs=self._state_seqs,
            residuals=self._residuals,
        ):
            if may_launch(self._device) and not number_of_modes():
                written, self._recording = recorded(self._forward.run, tensors)
            else:
                written = self._forward.run(tensors)
        self.run = self._forward.plan.run  # type: ignore[method-assign, assignment]  # nothing is left to compile
        return written

    def computing(self, compute: Compute, tensors: Tensors) -> Again | None:
        """Returns a function as `NativeScan.again` does, for calls in which some tensors are computed from others.

        Args:
            compute: function that takes tensors like `tensors`, and returns the computed tensors, by position.
            tensors: `[*inputs, *states, *lifted]` followed by further tensors. The scan reads a computed tensor instead
                of the tensor at its position. This method does not change the tensors.

        Returns:
            The function; `None` if the compiled launcher cannot run these calls.
        """
        native, count = self.native, len(self._needs_grad)
        first_lifted = self.step.trace.num_inputs + self.step.trace.num_states
        copies = [t if t is None or i < first_lifted else t.detach().clone() for i, t in enumerate(tensors)]
        if native is None or [*map(_find_alignment, copies)] != [*map(_find_alignment, tensors)]:
            return None
        result_by_position: dict[int, int] = {}

        def call(arguments: Tensors) -> Sequence[Any]:
            computed_tensors = compute(arguments)
            results = self.run([computed_tensors.get(i, tensor) for i, tensor in enumerate(arguments[:count])])
            result_by_position.update((place, len(results) + i) for i, place in enumerate(computed_tensors))
            return [*results, *computed_tensors.values()]

        with torch.no_grad():
            _, recording = recorded(call, copies)
        return None if isinstance(recording, str) else native.after(recording, tensors, result_by_position)

    def _select_for_kernel(self, needs_grad: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns, for each tensor, True if the kernel computes its gradient for the caller or for the last step."""
        if self._last is None or not needs_grad[0]:
            return needs_grad
        return tuple([is_needed or i in self._last.others for i, is_needed in enumerate(needs_grad)])

    def _prepare(self, tensors: Tensors, needs_grad: tuple[bool, ...]) -> Call:
        scan = backward_of(
            self.step,
            tensors,
            self._select_for_kernel(needs_grad),
            state_seqs=self._state_seqs,
            residuals=self._residuals,
        )
        plan = scan.flowing
        if self._last is not None and needs_grad[0]:
            without_flow = {i for i, is_needed in enumerate(needs_grad) if not is_needed} | (plan.absent - {0})
            plan = plan.then(self._last.at(len(tensors)), frozenset(without_flow))
        return plan.run

    def _compute(self, backward: PreparedBackward, tensors: Tensors) -> Sequence[Tensor | None]:
        is_due = not backward.registered and (bool(self._natives) or self._count % _CHECK_INTERVAL == 1)
        module = compiled_launcher(self._device, self._count) if is_due else None
        gradients = backward.call(tensors)
        if module is None:
            return gradients
        del gradients  # the call has compiled the launches, as the recording requires
        gradients, backward.recordings[None] = recorded(backward.call, tensors)
        self._hand_over(module, self._recording, backward, tensors)
        if not self._natives:  # records the next forward again: its launches may then have addresses
            backward.registered.clear()
            self.__dict__.pop("run", None)
        return gradients


def _find_alignment(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr() % 16


def trained_scan(
    step: Specialization, arguments: Arguments, needs_grad: tuple[bool, ...], *, state_seqs: bool
) -> TrainedScan:
    """Returns the prepared scan for arguments of this layout."""
    key = "trained", needs_grad, state_seqs, choose_segments(step, arguments), arguments.key
    scan: TrainedScan | None = step.plans.get(key)
    if scan is None:
        scan = step.plans[key] = TrainedScan(step, arguments, needs_grad, state_seqs=state_seqs)
    return scan


def not_differentiable(
    step: Any, results: Sequence[Tensor], needs_grad: Sequence[bool], num_steps: int | None, *, state_seqs: bool
) -> list[Tensor]:
    """Lists the results through which no gradient flows; the arguments are those of `differentiable_results`."""
    differentiable = differentiable_results(step, needs_grad, num_steps, state_seqs=state_seqs)
    return [t for t, flows in zip(results, differentiable, strict=False) if not flows]


def differentiable_results(
    step: Any, needs_grad: Sequence[bool], num_steps: int | None, *, state_seqs: bool
) -> tuple[bool, ...]:
    """Returns, for each result, True if a gradient flows from it to a tensor that requires grad, as in a loop.

    Args:
        step: a `CoreSpecialization`.
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if it requires grad.
        num_steps: T; `None` if T is unknown and at least 1.
    """
    trace = step.trace
    first, first_lifted = trace.num_inputs, trace.num_inputs + trace.num_states
    states = tuple(needs_grad[first:first_lifted])
    if num_steps == 0:  # empty sequences depend on nothing; the final states are the initial states
        nothing = (False,) * (trace.num_outputs + trace.num_states)
        return nothing if state_seqs else (*nothing[: trace.num_outputs], *states)
    flows: tuple[bool, ...] = (False,) * (trace.num_outputs + trace.num_states)
    history: list[tuple[bool, ...]] = []  # for each step, flags of the states before this step
    while states not in history:
        if num_steps is not None and len(history) == num_steps:
            break
        history.append(states)
        after = _flag_after_step(trace, needs_grad, states)
        flows = tuple(a or b for a, b in zip(flows, after, strict=True))
        states = after[trace.num_outputs :]
    if state_seqs or num_steps is None:
        return flows
    if states in history:  # the flags repeat in a cycle
        cycle_start = history.index(states)
        states = history[cycle_start + (num_steps - cycle_start) % (len(history) - cycle_start)]
    return (*flows[: trace.num_outputs], *states)


def _flag_after_step(trace: Any, needs_grad: Sequence[bool], states: Sequence[bool]) -> tuple[bool, ...]:
    """Returns, for each result of one step, True if it requires grad.

    Args:
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if it requires grad. The entries of states are
            ignored.
        states: for each state, True if it requires grad before the step.
    """
    first = trace.num_inputs
    with_grad = {
        i for i, is_needed in enumerate((*needs_grad[:first], *states, *needs_grad[first + len(states) :])) if is_needed
    }
    results = zip(trace.differentiable, trace.leads_to, strict=True)
    return tuple(flows and not with_grad.isdisjoint(leads_to) for flows, leads_to in results)
