"""The forward and the backward of a scan over a step with matrix products, and the memory of its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from flexsn_graph import Port, Role, StagedStep, ports
from flexsn_hop.formats import contiguous_strides
from flexsn_runtime._torch_private import copy_each
from flexsn_runtime.kernels._sums import input_gradient
from flexsn_runtime.launches._beside import compiling
from flexsn_runtime.operands._operands import Arguments
from flexsn_runtime.operands._order import strides_like
from flexsn_runtime.recurrent._backward_plan import backward_plan
from flexsn_runtime.recurrent._over_time import OverTime, Rows, rows_of
from flexsn_runtime.recurrent._staged import RecurrentSpecialization, StagedScan

_WRITTEN = frozenset({Role.OPERAND, Role.PRODUCT})


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context without autocast, because the graph already contains the conversions of autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _allocate_intermediates(
    staged: StagedStep,
    num_steps: int,
    sequences: frozenset[Port],
    device: torch.device,
    order: Sequence[int] | None,
) -> dict[Port, Rows]:
    """Allocates memory for operands and products.

    If a step reads values of later steps, the memory includes zeros for the steps after the last step.
    """
    num_later: dict[Port, int] = {}
    for port, steps in staged.later.values():
        num_later[port] = max(num_later.get(port, 0), steps)
    intermediates = {}
    for port, (shape, dtype) in staged.values.items():
        if port.role in _WRITTEN:
            rows, zero = num_steps if port in sequences else 1, port in staged.assembled
            memory = rows_of(rows + num_later.get(port, 0), shape, order, dtype=dtype, device=device, zero=zero)
            intermediates[port] = Rows(memory, 0, num_steps)
            if port in num_later:
                memory[num_steps:].zero_()
    return intermediates | {
        port: Rows(intermediates[of].memory, steps, num_steps) for port, (of, steps) in staged.later.items()
    }


def _find_order(step: RecurrentSpecialization, arguments: Arguments) -> tuple[int, ...] | None:
    """Returns the order of a step's dimensions in memory between stages and convolutions: the order of the inputs.

    The result is `None` for the usual order, which products with matrices always have.
    """
    if not step.trace.forward.has_convolutions:
        return None
    dims = step.format(arguments.inputs, arguments.states).order.dims
    return None if dims == tuple(range(len(dims))) else dims


def forward_staged(
    step: RecurrentSpecialization,
    arguments: Arguments,
    *,
    state_seqs: bool,
    kept_ports: frozenset[Port],
    needs_grad: Sequence[bool] | None = None,
) -> tuple[tuple[Tensor, ...], dict[Port, Tensor]]:
    """Runs the forward. Returns the results, and the memory of the kept values.

    Args:
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if the backward will compute its gradient; `None`
            if no backward follows.
    """
    trace, num_steps, device = step.trace, arguments.num_steps, arguments.device
    staged, shape = trace.forward, trace.step_shape
    forms = [step.format(arguments.inputs, arguments.states, v.shape) for v in (*trace.outputs, *trace.states)]
    outputs = [
        torch.empty_strided((num_steps, *v.shape), form.sequence, dtype=v.dtype, device=device)
        for v, form in zip(trace.outputs, forms, strict=False)
    ]
    state_ports = ports(Role.STATE, trace.num_states)
    lasting = step.lasting.get((state_seqs, kept_ports))
    if lasting is None:
        returned_ports = frozenset(state_ports if state_seqs else ())
        shift_sources = {source for source, _ in staged.shifts.values()}
        lasting = step.lasting[state_seqs, kept_ports] = staged.sequences | kept_ports | returned_ports | shift_sources
    order = _find_order(step, arguments)
    states = _allocate_states(step, arguments, lasting, order)
    intermediates = _allocate_intermediates(staged, num_steps, lasting, device, order)
    saved = {port: intermediates[port].memory for port in kept_ports if port in intermediates}
    saved |= {port: states[port.index] for port in kept_ports if port.role is Role.STATE}
    if num_steps and 0 not in shape:
        reads, writes = dict(intermediates), dict(intermediates)
        for port, x in zip(ports(Role.INPUT, trace.num_inputs), arguments.inputs, strict=True):
            reads[port] = Rows(x.detach(), 0, num_steps)
        for port, memory in zip(state_ports, states, strict=True):
            reads[port] = Rows(memory, 0, num_steps)
            if port not in staged.shifts:
                writes[port] = Rows(memory, 1, num_steps)
        for port, y in zip(ports(Role.OUTPUT, trace.num_outputs), outputs, strict=True):
            writes[port] = Rows(y, 0, num_steps)
        from_zero = all(initial is None for initial in arguments.states)
        over = OverTime.of(staged, num_steps, reads, writes, arguments.lifted, lasting, from_zero=from_zero)
        with _compiling_backward(step, arguments, saved, kept_ports, outputs, needs_grad, state_seqs=state_seqs):
            StagedScan(step, over).run()
    of_states = forms[trace.num_outputs :]
    if state_seqs:
        carried = _copy_all([m[1:] for m in states], [form.sequence for form in of_states])
    else:
        carried = _copy_all([m[num_steps % m.shape[0]] for m in states], [form.step for form in of_states])
    return (*outputs, *carried), saved


def _allocate_states(
    step: RecurrentSpecialization, arguments: Arguments, lasting: frozenset[Port], order: Sequence[int] | None
) -> list[Tensor]:
    """Allocates memory for states: one row for each step, or two rows that alternate. Sets the first row.

    If a state repeats the values of another state a few steps later, both states share memory. The rows of the state
    that repeats the values begin that many rows earlier.
    """
    num_steps = arguments.num_steps
    shifts = step.trace.forward.shifts
    state_ports = ports(Role.STATE, step.trace.num_states)
    earlier = {source: 0 for source, _ in shifts.values()}
    for source, steps in shifts.values():
        earlier[source] = max(earlier[source], steps)
    memory_by_port: dict[Port, Tensor] = {}
    for port, value in zip(state_ports, step.trace.states, strict=True):
        if port not in shifts:
            rows = num_steps + 1 + earlier.get(port, 0) if port in lasting else 2
            memory_by_port[port] = rows_of(rows, value.shape, order, dtype=value.dtype, device=arguments.device)
    states = []
    for port, initial in zip(state_ports, arguments.states, strict=True):
        source, steps = shifts.get(port, (port, 0))
        memory = memory_by_port[source]
        if source in earlier:
            first = earlier[source] - steps
            memory = memory[first : first + num_steps + 1]
        if initial is not None:
            memory[0].copy_(initial)
        states.append(memory)
    if all(initial is None for initial in arguments.states):
        for port, memory in memory_by_port.items():
            memory[: 1 + earlier.get(port, 0)].zero_()  # the first rows of all states in this memory
    else:
        for memory, initial in zip(states, arguments.states, strict=True):
            if initial is None:
                memory[0].zero_()
    return states


def _copy(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns a copy in new memory, so that callers cannot change the values that are kept for the backward."""
    copy = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _copy_all(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Copies tensors in few launches. Each copy has its own strides."""
    copies = [
        torch.empty_strided(t.shape, tuple(strides_of_copy), dtype=t.dtype, device=t.device)
        for t, strides_of_copy in zip(tensors, strides, strict=True)
    ]
    copy_each(copies, tensors)
    return copies


def _needs_compilation(step: RecurrentSpecialization) -> bool:
    """True if kernels have to be compiled, False if an interpreter runs them."""
    return not step.backend.interpreted


def _compiling_backward(
    step: RecurrentSpecialization,
    arguments: Arguments,
    memory: Mapping[Port, Tensor],
    kept_ports: frozenset[Port],
    outputs: Sequence[Tensor],
    needs_grad: Sequence[bool] | None,
    *,
    state_seqs: bool,
) -> AbstractContextManager[None]:
    """Returns a context for a forward, in which the step's first backward is compiled.

    In this backward, which most calls need, all differentiable outputs have gradients, and returned states have none.
    Compilation depends on the layout of memory, but not on its contents.
    """
    if needs_grad is None or step.backward_plans or not _needs_compilation(step):
        return nullcontext()
    if arguments.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return nullcontext()  # other threads must not allocate memory now

    def prepare() -> list[Callable[[], object]]:
        trace = step.trace
        grads = [y if flows else None for y, flows in zip(outputs, trace.differentiable, strict=False)]
        grads += [None] * trace.num_states
        backward = _Backward(step, arguments, memory, kept_ports, grads, needs_grad, state_seqs=state_seqs)
        return backward.compilations()

    return compiling(prepare)


def backward_staged(
    step: RecurrentSpecialization,
    arguments: Arguments,
    memory: Mapping[Port, Tensor],
    kept_ports: frozenset[Port],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Tensor | None]:
    """Computes the gradients of `[*inputs, *states, *lifted]`; `None` for an absent or unneeded gradient."""
    if arguments.num_steps == 0 or 0 in step.trace.step_shape:
        return _compute_without_steps(step, arguments, grads, needs_grad, state_seqs=state_seqs)
    return _Backward(step, arguments, memory, kept_ports, grads, needs_grad, state_seqs=state_seqs).run()


class _Backward:
    """A backward over at least one step, and its memory. The arguments are those of `backward_staged`."""

    def __init__(
        self,
        step: RecurrentSpecialization,
        arguments: Arguments,
        memory: Mapping[Port, Tensor],
        kept_ports: frozenset[Port],
        grads: Sequence[Tensor | None],
        needs_grad: Sequence[bool],
        *,
        state_seqs: bool,
    ) -> None:
        trace, num_steps, device = step.trace, arguments.num_steps, arguments.device
        self._step, self._arguments, self._memory = step, arguments, memory
        self._needs_grad, self._state_seqs = needs_grad, state_seqs
        self._order = _find_order(step, arguments)
        # An expanded gradient, such as the gradient of a sum over time, would need another kernel, so it is copied.
        self._of_outputs = [
            _copy(g, step.format(arguments.inputs, arguments.states, v.shape).sequence)
            if g is not None and (g.is_neg() or g._is_zerotensor() or 0 in g.stride())
            else g
            for g, v in zip(grads, trace.outputs, strict=False)
        ]
        self._of_states = grads[trace.num_outputs :]
        self._plan = plan = backward_plan(step, num_steps, kept_ports, grads, needs_grad, state_seqs=state_seqs)
        self._carried: dict[int, Tensor] = {}
        for i, value in enumerate(trace.states):
            port = Port(Role.GRAD_STATE, i)
            g = self._of_states[i]
            if g is None and port not in plan.results:
                continue
            # The gradient after step t is in row t + 1, and the gradient before step t is in row t.
            rows = num_steps + 1 if state_seqs or port in plan.sequences else 2
            zero = port not in plan.absent
            gradient = rows_of(rows, value.shape, self._order, dtype=value.dtype, device=device, zero=zero)
            self._carried[i] = gradient
            if g is not None and not state_seqs:
                gradient[num_steps % rows].copy_(g)
        self._gradients: list[Tensor | None] = [None] * len(needs_grad)
        self._grad_inputs = ports(Role.GRAD_INPUT, trace.num_inputs)
        for i, (port, x) in enumerate(zip(self._grad_inputs, arguments.inputs, strict=True)):
            if port in plan.of_inputs:
                step_shape, dtype = plan.of_inputs[port]
                sequence_shape = (num_steps, *step_shape)
                has_usual_order = x.shape != sequence_shape or x.is_contiguous()
                strides = contiguous_strides(sequence_shape) if has_usual_order else strides_like(x)
                self._gradients[i] = torch.empty_strided(sequence_shape, strides, dtype=dtype, device=device)

    def scans(self) -> Iterator[StagedScan]:
        """Yields the scan of each segment of the plan, in order."""
        step, arguments = self._step, self._arguments
        trace = step.trace
        for start, count, staged in self._plan.segments:
            reads: dict[Port, Rows] = _allocate_intermediates(
                staged, count, staged.sequences, arguments.device, self._order
            )
            writes = dict(reads)
            for port, x in zip(ports(Role.INPUT, trace.num_inputs), arguments.inputs, strict=True):
                reads[port] = Rows(x.detach(), start, count)
            for port, memory in self._memory.items():
                if port.role is Role.STATE:
                    reads[port] = Rows(memory, start, count)
            for i, port in enumerate(staged.saved):
                reads[Port(Role.SAVED, i)] = Rows(self._memory[port], start, count)
            for port, g in zip(ports(Role.GRAD_OUTPUT, trace.num_outputs), self._of_outputs, strict=True):
                if g is not None:
                    reads[port] = Rows(g, start, count)
            for i, gradient in self._carried.items():
                port = Port(Role.GRAD_STATE, i)
                reads[port], writes[port] = Rows(gradient, start + 1, count), Rows(gradient, start, count)
            for port, of_input in zip(self._grad_inputs, self._gradients, strict=False):
                if of_input is not None and port in staged.results:
                    writes[port] = Rows(of_input, start, count)
                elif of_input is not None:
                    of_input[start : start + count].zero_()
            arriving = [
                (self._carried[i][start:], g[start:])
                for i, g in enumerate(self._of_states)
                if self._state_seqs and g is not None
            ]
            over = OverTime.of(
                staged,
                count,
                reads,
                writes,
                arguments.lifted,
                staged.sequences,
                backwards=True,
                arriving=arriving,
            )
            yield StagedScan(step, over)

    def compilations(self) -> list[Callable[[], object]]:
        """Returns functions that compile the launches of `run`."""
        first_lifted = self._step.trace.num_inputs + self._step.trace.num_states
        compilations: list[Callable[[], object]] = []
        for segment, scan in zip(self._plan.segments, self.scans(), strict=True):
            compilations.append(scan.compile)
            for term in segment.staged.terms:
                if self._needs_grad[first_lifted + term.lifted]:
                    compilations += scan.compilations_of(term)
        return compilations

    def run(self) -> list[Tensor | None]:
        """Runs the backward, and returns the gradients."""
        step, arguments, gradients, needs_grad = self._step, self._arguments, self._gradients, self._needs_grad
        first_state = step.trace.num_inputs
        first_lifted = first_state + step.trace.num_states
        segments = self._plan.segments
        for segment, scan in zip(segments, self.scans(), strict=True):
            scan.run()
            for term in segment.staged.terms:
                place = first_lifted + term.lifted
                if needs_grad[place]:
                    part, before = scan.summed(term), gradients[place]
                    gradients[place] = part if before is None else before + part
        for i, x in enumerate(arguments.inputs):
            gradient_of = gradients[i]
            if gradient_of is not None and gradient_of.shape != x.shape:
                gradients[i] = input_gradient(gradient_of, x, by_program=False)
        for i, gradient in self._carried.items():
            initial = arguments.states[i]
            flows = Port(Role.GRAD_STATE, i) in segments[-1].staged.results
            if flows and needs_grad[first_state + i] and initial is not None:
                gradients[first_state + i] = _copy(gradient[0], strides_like(initial))
        for place, tensor in enumerate(arguments.lifted, first_lifted):
            gradient_of = gradients[place]
            if gradient_of is not None:
                gradients[place] = gradient_of.reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)
        return gradients


def _compute_without_steps(
    step: RecurrentSpecialization,
    arguments: Arguments,
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    *,
    state_seqs: bool,
) -> list[Tensor | None]:
    """Returns the gradients of a scan without steps or without elements.

    Without steps, the final states are the initial states.
    """
    trace = step.trace
    gradients: list[Tensor | None] = [None] * len(needs_grad)
    empty = math.prod(trace.step_shape) == 0 and arguments.num_steps > 0
    for i, tensor in enumerate(arguments.all):
        if empty and needs_grad[i] and tensor is not None:
            gradients[i] = torch.zeros_like(tensor)
    if not state_seqs and not empty:
        for i in range(trace.num_states):
            if needs_grad[trace.num_inputs + i]:
                gradients[trace.num_inputs + i] = grads[trace.num_outputs + i]
    return gradients
