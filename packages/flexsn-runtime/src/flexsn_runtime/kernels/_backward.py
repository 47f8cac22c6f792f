"""The plan of a backward scan: the kernel, the gradients that it writes, and sums for tensors that broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_codegen import BackwardSpec
from flexsn_graph import Port, Presence, Residuals, Role
from flexsn_hop.formats import contiguous_strides
from flexsn_runtime.calls._plan import Allocation, Copied, Memory, Plan, Summed, launching
from flexsn_runtime.kernels._rows import fewer_elements, rows
from flexsn_runtime.kernels._sums import InputGradient, LiftedGradient, summed_together
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.launches._launches import launch
from flexsn_runtime.operands._operands import Arguments, Operands, loaded_early
from flexsn_runtime.operands._order import strides_like
from flexsn_runtime.plans._buckets import LaunchPlan
from flexsn_runtime.segments._backward import SegmentedBackward
from flexsn_runtime.segments._choice import Choice, composes
from flexsn_runtime.segments._kernels import SerialScan
from flexsn_runtime.step._pointwise_step import Specialization


class Cotangents(NamedTuple):
    """Incoming gradients. `None` stands for zeros.

    Attributes:
        outputs: gradients of the outputs, `[T, *step]` each.
        states: gradients of the state sequences, `[T, *step]` each, or of the final states, `[*step]` each.
        state_seqs: True if `states` are gradients of state sequences.
    """

    outputs: tuple[Tensor | None, ...]
    states: tuple[Tensor | None, ...]
    state_seqs: bool

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        return (*self.outputs, *self.states)


def split_cotangents(grads: Sequence[Tensor | None], num_outputs: int, *, state_seqs: bool) -> Cotangents:
    """Splits the gradients of `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)` by role."""
    return Cotangents(tuple(grads[:num_outputs]), tuple(grads[num_outputs:]), state_seqs)


class BackwardScan:
    """A backward scan, prepared for arguments and cotangents of one layout.

    Each gradient has the memory format of its argument.

    Args:
        arguments: the arguments of the forward.
        saved: checkpoints or residuals, as the forward returned them, or copies in another format.
        needs_grad: for each of `[*inputs, *states, *lifted]`, True if its gradient is needed.
        residuals: the residuals that the forward saved; `None` for checkpoints.
        plan: same as for `ForwardScan`.
        segments: segments to compute in parallel, if the VJP allows this; `None` to compute all steps in order.

    Attributes:
        plan: allocations, steps and results of a call. It takes `[*inputs, *states, *lifted, *checkpoints or
            *residuals, *grad_outputs, *grad_states]`, and returns a gradient for each tensor of the forward that needs
            a gradient, in the tensor's shape. The gradient is zeros if no gradient flows to the tensor.
        flowing: the same plan, except that it returns `None` for tensors to which no gradient flows, as a loop does.
    """

    def __init__(
        self,
        step: Specialization,
        arguments: Arguments,
        saved: Sequence[Tensor],
        cotangents: Cotangents,
        needs_grad: Sequence[bool],
        *,
        residuals: Residuals | None = None,
        plan: LaunchPlan | None = None,
        segments: Choice | None = None,
    ) -> None:
        trace = step.trace
        self._device = arguments.device
        self._needs_grad = tuple(needs_grad)
        num_inputs, num_states = trace.num_inputs, trace.num_states
        self._first_state, self._first_lifted = num_inputs, num_inputs + num_states
        self._state_seqs = cotangents.state_seqs
        grad_inputs = self._needs_grad[:num_inputs]
        grad_states = self._needs_grad[num_inputs : num_inputs + num_states]
        grad_lifted = self._needs_grad[num_inputs + num_states :]
        differentiable_outputs = trace.differentiable[: trace.num_outputs]
        differentiable_states = trace.differentiable[trace.num_outputs :]
        present = tuple(g is not None and d for g, d in zip(cotangents.outputs, differentiable_outputs, strict=True))
        if residuals is None:
            vjp, source = step.vjp((*present, *differentiable_states), step.carrying(self._needs_grad))
        else:
            vjp, source = step.vjp_of(residuals, present)
        self._empty = arguments.num_steps == 0 or 0 in trace.step_shape
        states_present = tuple(g is not None for g in cotangents.states)
        self._presence = Presence(vjp, num_inputs, num_states, states_present, every_step=self._state_seqs)
        self._num_steps, self._states_present = arguments.num_steps, states_present
        if source is None or self._empty:
            no_allocations = [None] * len(self._needs_grad)
            self.plan = Plan.of(self._device, no_allocations, [self._zero_gradients], allocator)
            return
        if segments is not None and not (
            composes(vjp, num_inputs, num_states, segments) and all(flag.always for flag in self._presence.flags)
        ):
            segments = None
        if self._presence.flags:
            vjp, source = step.flagged(self._presence, (residuals, present, self._needs_grad))
            assert source is not None, "flags do not change the number of gradients"

        # The kernel computes the states again, so it reads the values that the forward reads, too.
        layouts = {**trace.forward.layouts, **vjp.layouts}
        form = step.format(arguments.inputs, arguments.states)
        operands = Operands(arguments, layouts, trace.step_shape, form.order, step.counts, step.late)
        absent = (False,) * num_states
        config = (step.plan(math.prod(trace.step_shape)) if plan is None else plan).backward
        config, rest, single = step.chunks(config, arguments.num_steps, step.cost.backward_ops)
        if segments is not None and arguments.num_steps < 2 * config.chunk:
            segments = None
        # If an argument is one number for the whole step, the kernel sums its gradient within each program. An input
        # that is one number expanded to the size of a step is excluded, because its gradient is as large as the step.
        summed_inputs = tuple(
            layout.step == 0 and all(size == 1 for size in x.shape[1:])
            for layout, x in zip(operands.inputs, arguments.inputs, strict=True)
        )
        summed_lifted = tuple(layout == 0 for layout in operands.lifted)
        by_program = (*summed_inputs, *(False,) * num_states, *summed_lifted)
        sequence_shape, ncl = (arguments.num_steps, *trace.step_shape), math.prod(trace.step_shape)
        ordered_shape = form.order.shape(trace.step_shape)
        element_layouts = {i: form.order.layout(layout) for i, layout in layouts.items()}
        row_division = None
        by_element = any(is_needed and not summed for is_needed, summed in zip(grad_lifted, summed_lifted, strict=True))
        by_step = any(is_needed and summed for is_needed, summed in zip(grad_inputs, summed_inputs, strict=True))
        if segments is None and source.target.rows and by_element and not by_step:
            row_config = replace(config, block=fewer_elements(config.block, config.num_warps, ncl))
            row_division = rows(ordered_shape, list(element_layouts.values()), row_config.block)
            config = config if row_division is None else row_config
        programs = -(-(ncl if row_division is None else math.prod(row_division.shape)) // config.block)
        # The memory for the gradient of each of `[*inputs, *states, *lifted]`, in the shape that the kernel writes.
        sums = (arguments.num_steps, programs)
        allocations = [
            *(
                Allocation(sums, contiguous_strides(sums), _choose_sum_dtype(x.dtype))
                if summed
                else Allocation(
                    sequence_shape, strides_like(x) if x.shape == sequence_shape else (ncl, *form.step), x.dtype
                )
                for x, summed in zip(arguments.inputs, summed_inputs, strict=True)
            ),
            *(
                Allocation(trace.step_shape, form.step if v is None else strides_like(v), value.dtype)
                for v, value in zip(arguments.states, trace.states, strict=True)
            ),
            *(
                Allocation(shape, contiguous_strides(shape), _choose_sum_dtype(value.dtype))
                for value, summed in zip(trace.lifted_values, summed_lifted, strict=True)
                for shape in ((programs,) if summed else ordered_shape if row_division is None else row_division.shape,)
            ),
        ]
        needed_allocations = [
            allocation if is_needed else None
            for allocation, is_needed in zip(allocations, self._needs_grad, strict=True)
        ]
        saved_params = [param for param, _ in step.kept(residuals)]
        state_role = Role.GRAD_STATE_SEQ if cotangents.state_seqs else Role.GRAD_FINAL_STATE
        cotangent_params = [
            *_list_ports(Role.GRAD_OUTPUT, cotangents.outputs),
            *_list_ports(state_role, cotangents.states),
        ]
        incoming = zip([*saved_params, *cotangent_params], [*saved, *cotangents.all], strict=True)
        gradient_params = [*_list_ports(Role.GRAD_INPUT, grad_inputs), *_list_ports(Role.GRAD_STATE, grad_states)]
        # Some incoming gradients are copied first. The copy has the format of the tensor to which the gradient belongs.
        format_by_dims = {len(sequence_shape): form.sequence, len(trace.step_shape): form.step}
        strided = operands.strided(
            [
                *(
                    (
                        param,
                        t.shape,
                        format_by_dims[t.dim()] if _is_copied(t) and param in cotangent_params else t.stride(),
                    )
                    for param, t in incoming
                    if t is not None
                ),
                *(
                    (param, allocation.shape, allocation.strides)
                    for param, allocation, summed in zip(gradient_params, needed_allocations, by_program, strict=False)
                    if allocation is not None and not summed
                ),
            ]
        )
        spec = BackwardSpec(
            inputs=loaded_early(operands.inputs, arguments.inputs, config.stages),
            states=operands.states,
            state_dtypes=step.state_dtypes,
            lifted=operands.lifted,
            lifted_like=operands.lifted_like,
            ends=step.ends and any(layout.counts_down for layout in operands.inputs),
            follows=step.follows,
            num_outputs=trace.num_outputs,
            grad_outputs=present,
            grad_state_seqs=states_present if cotangents.state_seqs else absent,
            grad_final_states=absent if cotangents.state_seqs else states_present,
            gradients=vjp.gradients,
            grad_inputs=grad_inputs,
            grad_states=grad_states,
            grad_lifted=grad_lifted,
            lifted_dtypes=step.lifted_dtypes,
            summed_inputs=summed_inputs,
            summed_lifted=summed_lifted,
            rows=row_division is not None,
            saved=len(residuals.dtypes) if residuals else 0,
            chunk=config.chunk,
            stages=config.stages,
            rest=rest,
            single=single and not any(layout.counts_down for layout in operands.inputs),
            strided=strided,
            flags=self._presence.flags,
        )
        kernel = step.backward_kernel(spec, source)
        integers = (
            operands.sizes
            | step.core().integers
            | source.integers
            | ({} if row_division is None else row_division.integers)
        )
        launched = launch(kernel, integers, config, arguments.device)
        if segments is not None:
            number = min(segments.number, arguments.num_steps // config.chunk)
            min_steps = segments.rule.launched
            scan = SerialScan(launched, kernel.params, step, spec, integers, config, arguments.device, min_steps)
            launched = SegmentedBackward(scan, source, step.columns(residuals, present), number)
        places = [
            *operands.params,
            *saved_params,
            *cotangent_params,
            *gradient_params,
            *_list_ports(Role.GRAD_LIFTED, grad_lifted),
        ]
        first_grad = len(arguments.all) + len(saved_params)
        copies = [
            Copied(i, tuple(g.shape), format_by_dims[g.dim()], g.dtype)
            for i, g in enumerate(cotangents.all, first_grad)
            if g is not None and _is_copied(g)
        ]
        kernel_places = [places.index(param) for param in kernel.params]
        steps = launching(operands, launched, kernel_places, len(places), copies)
        first = first_grad + len(cotangent_params)
        # Sums the gradients that the kernel writes in shapes other than the shapes of their tensors.
        steps += (
            Summed(first + i, i, InputGradient(x, by_program=by_program[i]))
            for i, x in enumerate(arguments.inputs)
            if x.shape != sequence_shape and needed_allocations[i] is not None
        )
        if row_division is not None:
            element_layouts = {i: row_division.layout(layout) for i, layout in element_layouts.items()}
        summed: list[tuple[Allocation, Summed]] = []
        for i, tensor in enumerate(arguments.lifted, self._first_lifted):
            if (allocation := needed_allocations[i]) is not None:
                sum_elements = LiftedGradient(
                    allocation.shape, tensor, element_layouts.get(i - self._first_lifted), by_program=by_program[i]
                )
                summed.append((allocation, Summed(first + i, i, sum_elements, sum_elements.plain(tensor))))
        is_separate = step.is_recorded or segments is not None
        steps += [sum_step for _, sum_step in summed] if is_separate else summed_together(first, summed)
        self.plan = Plan.of(self._device, needed_allocations, steps, launched.allocator)

    def __call__(
        self, arguments: Arguments, checkpoints: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Tensor | None]:
        """Runs the plan.

        Args:
            checkpoints: checkpoints or residuals.
        """
        return self.run((*arguments.all, *checkpoints, *cotangents.all))

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the plan."""
        return self.plan.run(tensors)

    @cached_property
    def flowing(self) -> Plan:
        without_flow = {
            i
            for i, (flows, is_needed) in enumerate(zip(self._flows, self._needs_grad, strict=True))
            if is_needed and not flows
        }
        return self.plan.without(frozenset(without_flow)) if without_flow else self.plan

    @cached_property
    def _flows(self) -> tuple[bool, ...]:
        """For each of `[*inputs, *states, *lifted]`, True if any gradient flows to this tensor.

        If no gradient flows to a tensor, the operations before the scan must not receive zeros for it, because their
        derivatives may be infinite.
        """
        if self._num_steps == 0:
            states = (is_present and not self._state_seqs for is_present in self._states_present)
            num_lifted = len(self._needs_grad) - self._first_lifted
            return (*(False,) * self._first_state, *states, *(False,) * num_lifted)
        return self._presence.flows(self._num_steps)

    def _zero_gradients(self, memory: Memory) -> None:
        """Computes gradients without a kernel: zeros, except for the initial states of an empty scan.

        If such a scan returns final states, these are the initial states, and have the same gradients.
        """
        first = len(memory) - len(self._needs_grad)
        for i, is_needed in enumerate(self._needs_grad):
            primal = memory[i]
            memory[first + i] = _create_zeros(primal) if is_needed and primal is not None else None
        if self._empty and not self._state_seqs:
            for i in range(self._first_state, self._first_lifted):
                final = memory[first + i - self._first_lifted]  # the gradients of states are the last arguments
                if (zeros := memory[first + i]) is not None and final is not None:
                    memory[first + i] = zeros.copy_(final)


def _is_copied(gradient: Tensor) -> bool:
    """True if an incoming gradient is copied before a kernel reads it.

    The memory of a lazily negated view lacks the sign. An expanded gradient, such as the gradient of a sum over time,
    would need its own kernel. The compilation of this kernel takes longer than many copies, and the last layer of a
    network is small. Zeros that autograd made may have no memory.
    """
    if gradient.is_neg() or gradient._is_zerotensor():
        return True
    strides = zip(gradient.shape, gradient.stride(), strict=True)
    return any(type(stride) is int and stride == 0 and size != 1 for size, stride in strides)  # a symbol is never 0


def _create_zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape).as_strided(tensor.shape, strides_like(tensor))


def _choose_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _list_ports(role: Role, entries: Sequence[object]) -> list[Port]:
    return [Port(role, i) for i in range(len(entries))]
