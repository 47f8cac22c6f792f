"""The backward scan: chooses the kernel, allocates the gradients, launches it, sums where tensors broadcast."""

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
from flexsn_runtime.kernels._rows import fewer_elements, rows
from flexsn_runtime.kernels._sums import LiftedGradient, input_gradient
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.launches._launches import Launch, launch
from flexsn_runtime.launches._sum import PlainSum
from flexsn_runtime.operands._layout import contiguous_strides
from flexsn_runtime.operands._operands import Arguments, Operands, picker
from flexsn_runtime.operands._order import in_order, strides_like, unusual_order
from flexsn_runtime.plans._buckets import LaunchPlan
from flexsn_runtime.segments._backward import SegmentedBackward
from flexsn_runtime.segments._choice import Choice, composes
from flexsn_runtime.step._pointwise_step import Specialization


class Cotangents(NamedTuple):
    """Incoming gradients; `None` is zero.

    Attributes:
        outputs: `[T, *step]` each.
        states: of the state sequences, `[T, *step]` each, or of the final states, `[*step]` each.
        state_seqs: which of the two.
    """

    outputs: tuple[Tensor | None, ...]
    states: tuple[Tensor | None, ...]
    state_seqs: bool

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        return (*self.outputs, *self.states)


def split_cotangents(grads: Sequence[Tensor | None], num_outputs: int, *, state_seqs: bool) -> Cotangents:
    """Gradients of `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`, by role."""
    return Cotangents(tuple(grads[:num_outputs]), tuple(grads[num_outputs:]), state_seqs)


class BackwardScan:
    """A backward scan, prepared for arguments and cotangents of one layout.

    Each gradient has the format of what it is the gradient of.

    Args:
        arguments: as in the forward.
        kept: checkpoints or residuals, as the forward returned them, or copies in another format.
        wanted: for each of `[*inputs, *states, *lifted]`, whether its gradient is asked for.
        residuals: what the forward kept; `None`: checkpoints.
        plan: as for `ForwardScan`.
        segments: walked side by side, where the step's gradient allows it; `None`: none.
    """

    def __init__(
        self,
        step: Specialization,
        arguments: Arguments,
        kept: Sequence[Tensor],
        cotangents: Cotangents,
        wanted: Sequence[bool],
        *,
        residuals: Residuals | None = None,
        plan: LaunchPlan | None = None,
        segments: Choice | None = None,
    ) -> None:
        trace = step.trace
        self._device = arguments.device
        self._wanted = tuple(wanted)
        self._launch: Launch | None = None
        num_inputs, num_states = trace.num_inputs, trace.num_states
        self._first_state, self._first_lifted = num_inputs, num_inputs + num_states
        self._state_seqs = cotangents.state_seqs
        wanted_inputs = self._wanted[:num_inputs]
        wanted_states = self._wanted[num_inputs : num_inputs + num_states]
        wanted_lifted = self._wanted[num_inputs + num_states :]
        differentiable_outputs = trace.differentiable[: trace.num_outputs]
        differentiable_states = trace.differentiable[trace.num_outputs :]
        present = tuple(g is not None and d for g, d in zip(cotangents.outputs, differentiable_outputs, strict=True))
        if residuals is None:
            vjp, source = step.vjp((*present, *differentiable_states), step.carrying(self._wanted))
        else:
            vjp, source = step.vjp_of(residuals, present)
        self._empty = arguments.num_steps == 0 or 0 in trace.step_shape
        states_present = tuple(g is not None for g in cotangents.states)
        self._presence = Presence(vjp, num_inputs, num_states, states_present, every_step=self._state_seqs)
        self._num_steps, self._states_present = arguments.num_steps, states_present
        if source is None or self._empty:
            return
        if segments is not None and not (
            composes(vjp, num_inputs, num_states, segments) and all(flag.always for flag in self._presence.flags)
        ):
            segments = None
        if self._presence.flags:
            vjp, source = step.flagged(self._presence, (residuals, present, self._wanted))
            assert source is not None, "it has as many gradients as without flags"

        # To compute the states again, the kernel reads what the forward reads, too.
        layouts = {**trace.forward.layouts, **vjp.layouts}
        form = step.format(arguments.inputs, arguments.states)
        self._operands = operands = Operands(arguments, layouts, trace.step_shape, form.order)
        absent = (False,) * num_states
        config = (step.plan(math.prod(trace.step_shape)) if plan is None else plan).backward
        config, rest = step.chunks(config, arguments.num_steps, step.cost.backward_ops)
        if segments is not None and arguments.num_steps < 2 * config.chunk:
            segments = None
        # What is one number for the whole step is summed by the kernel, up to the programs. (An input whose layout
        # alone says so is a view of one; its gradient is as large as the view.)
        summed_inputs = tuple(
            layout.step == 0 and all(size == 1 for size in x.shape[1:])
            for layout, x in zip(operands.inputs, arguments.inputs, strict=True)
        )
        summed_lifted = tuple(layout == 0 for layout in operands.lifted)
        self._summed = (*summed_inputs, *(False,) * num_states, *summed_lifted)
        full, ncl = (arguments.num_steps, *trace.step_shape), math.prod(trace.step_shape)
        counted = form.order.shape(trace.step_shape)
        read_by = {i: form.order.layout(layout) for i, layout in layouts.items()}
        cut = None
        by_element = any(want and not summed for want, summed in zip(wanted_lifted, summed_lifted, strict=True))
        by_step = any(want and summed for want, summed in zip(wanted_inputs, summed_inputs, strict=True))
        if segments is None and source.target.rows and by_element and not by_step:
            narrow = replace(config, block=fewer_elements(config.block, config.num_warps))
            cut = rows(counted, list(read_by.values()), narrow.block)
            config = config if cut is None else narrow
        programs = -(-(ncl if cut is None else math.prod(cut.shape)) // config.block)
        # For each of `[*inputs, *states, *lifted]`: the gradient as the kernel writes it.
        sums = (arguments.num_steps, programs)
        described = [
            *(
                (sums, contiguous_strides(sums), _sum_dtype(x.dtype))
                if summed
                else (full, strides_like(x) if x.shape == full else (ncl, *form.step), x.dtype)
                for x, summed in zip(arguments.inputs, summed_inputs, strict=True)
            ),
            *(
                (trace.step_shape, form.step if v is None else strides_like(v), value.dtype)
                for v, value in zip(arguments.states, trace.states, strict=True)
            ),
            *(
                (shape, contiguous_strides(shape), _sum_dtype(value.dtype))
                for value, summed in zip(trace.lifted_values, summed_lifted, strict=True)
                for shape in ((programs,) if summed else counted if cut is None else cut.shape,)
            ),
        ]
        self._written = [one if want else None for one, want in zip(described, self._wanted, strict=True)]
        kept_params = [param for param, _ in step.kept(residuals)]
        state_role = Role.GRAD_STATE_SEQ if cotangents.state_seqs else Role.GRAD_FINAL_STATE
        cotangent_params = [*_params(Role.GRAD_OUTPUT, cotangents.outputs), *_params(state_role, cotangents.states)]
        came = zip([*kept_params, *cotangent_params], [*kept, *cotangents.all], strict=True)
        gradient_params = [*_params(Role.GRAD_INPUT, wanted_inputs), *_params(Role.GRAD_STATE, wanted_states)]
        # The format of a gradient that is copied first: that of what it is the gradient of.
        dense = {len(full): form.sequence, len(trace.step_shape): form.step}
        strided = operands.strided(
            [
                *(
                    (param, t.shape, dense[t.dim()] if _is_copied(t) and param in cotangent_params else t.stride())
                    for param, t in came
                    if t is not None
                ),
                *(
                    (param, one[0], one[1])
                    for param, one, summed in zip(gradient_params, self._written, self._summed, strict=False)
                    if one is not None and not summed
                ),
            ]
        )
        spec = BackwardSpec(
            inputs=operands.inputs,
            states=operands.states,
            state_dtypes=step.state_dtypes,
            lifted=operands.lifted,
            lifted_like=operands.lifted_like,
            num_outputs=trace.num_outputs,
            grad_outputs=present,
            grad_state_seqs=states_present if cotangents.state_seqs else absent,
            grad_final_states=absent if cotangents.state_seqs else states_present,
            gradients=vjp.gradients,
            grad_inputs=wanted_inputs,
            grad_states=wanted_states,
            grad_lifted=wanted_lifted,
            lifted_dtypes=step.lifted_dtypes,
            summed_inputs=summed_inputs,
            summed_lifted=summed_lifted,
            rows=cut is not None,
            saved=len(residuals.dtypes) if residuals else 0,
            chunk=config.chunk,
            stages=config.stages,
            rest=rest,
            strided=strided,
            flags=self._presence.flags,
        )
        kernel = step.backward_kernel(spec, source)
        integers = operands.sizes | step.core().integers | source.integers | ({} if cut is None else cut.integers)
        self._launch = launch(kernel, integers, config, arguments.device)
        if segments is not None:
            columns = step.columns(residuals, present)
            integers |= {} if columns.vjp is None else columns.vjp.integers
            self._launch = SegmentedBackward(
                self._launch,
                kernel.params,
                step,
                spec,
                source,
                columns,
                integers,
                config,
                arguments.device,
                min(segments.number, arguments.num_steps // config.chunk),
            )
        allocate = self._launch.allocator
        self._allocators = [
            None if one is None else allocate(one[0], one[1], dtype=one[2], device=self._device)
            for one in self._written
        ]
        first_grad = len(arguments.all) + len(kept_params)
        self._copied = {
            first_grad + i: dense[g.dim()] for i, g in enumerate(cotangents.all) if g is not None and _is_copied(g)
        }
        places = [
            *operands.params,
            *kept_params,
            *cotangent_params,
            *gradient_params,
            *_params(Role.GRAD_LIFTED, wanted_lifted),
        ]
        self._places = [places.index(param) for param in kernel.params]
        self._in_order = picker(self._places)
        # Those whose gradients the kernel writes in another shape than theirs.
        self._broadcast = {i: unusual_order(x) for i, x in enumerate(arguments.inputs) if x.shape != full}
        if cut is not None:
            read_by = {i: cut.layout(layout) for i, layout in read_by.items()}
        self._sums = {
            i: LiftedGradient(one[0], tensor, read_by.get(i - self._first_lifted), by_program=self._summed[i])
            for i, tensor in enumerate(arguments.lifted, self._first_lifted)
            if (one := self._written[i]) is not None
        }
        self._moves = operands.moves

    def __call__(
        self, arguments: Arguments, checkpoints: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Tensor | None]:
        """Runs it.

        Args:
            checkpoints: or residuals.

        Returns:
            A gradient for each that is asked for, shaped like the tensor; zeros where no gradient flows.
        """
        return self.run((*arguments.all, *checkpoints, *cotangents.all))

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same, from `[*inputs, *states, *lifted, *checkpoints or *residuals, *grad_outputs, *grad_states]`."""
        if self._launch is None:
            return self._zero_gradients(given)
        gradients = [None if allocate is None else allocate() for allocate in self._allocators]
        self._launch(self._arguments_of(given, gradients))
        for i, order in self._broadcast.items():
            gradients[i] = in_order(input_gradient(gradients[i], given[i], self._summed[i]), order)
        for i, sums in self._sums.items():
            written, lifted = gradients[i], given[i]
            assert written is not None
            assert lifted is not None
            gradients[i] = sums(written, lifted)
        return gradients

    def plain_sums(self, given: Sequence[Tensor | None]) -> dict[int, PlainSum] | None:
        """What `gradients` sums up behind the kernel, by gradient; `None`: it does more with some than to sum them."""
        sums = {i: one.plain(tensor) for i, one in self._sums.items() if (tensor := given[i]) is not None}
        plain = {i: one for i, one in sums.items() if one is not None}
        return plain if len(plain) == len(sums) and not self._broadcast else None

    def copies(self, given: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Of incoming gradients that are copied first: tensors like the copies, without memory."""
        found = {}
        for place, strides in self._copied.items():
            gradient = given[place]
            assert gradient is not None
            found[place] = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device="meta")
        return found

    def by_address(self) -> ByAddress | None:
        """How `gradients` launches, as `ForwardScan.by_address`."""
        if self._launch is None or not self._all_flow or self._moves:
            return None
        written = [
            None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device="meta")
            for one in self._written
        ]
        return ByAddress.of(self._launch, self._places, written, self._device)

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `run`; but where no gradient flows, there is none, as in the loop."""
        gradients = self.run(given)
        if self._all_flow:
            return gradients
        return [g if flows else None for g, flows in zip(gradients, self._flows, strict=True)]

    @cached_property
    def _all_flow(self) -> bool:
        """Whether a gradient flows to all that it is asked of."""
        return all(flows or not want for flows, want in zip(self._flows, self._wanted, strict=True))

    @cached_property
    def _flows(self) -> tuple[bool, ...]:
        """For each of `[*inputs, *states, *lifted]`, whether a gradient flows to it at all.

        What comes before the scan is not to meet a zero otherwise: its derivative may be infinite.
        """
        if self._num_steps == 0:
            states = (there and not self._state_seqs for there in self._states_present)
            behind = len(self._wanted) - self._first_lifted
            return (*(False,) * self._first_state, *states, *(False,) * behind)
        return self._presence.flows(self._num_steps)

    def compile(self, given: Sequence[Tensor | None]) -> None:
        """Compiles the kernel without running it, for tensors like these in dtype and alignment; as for `run`."""
        if self._launch is None:
            return
        gradients = [
            None if one is None else torch.empty(0, dtype=one[2], device=self._device) for one in self._written
        ]
        self._launch.compile(self._arguments_of(given, gradients))

    def _arguments_of(self, given: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The tensors that the kernel takes, in its order."""
        tensors = [*given, *gradients]
        if self._moves:
            self._operands.move(tensors)
        for place, strides in self._copied.items():
            gradient = tensors[place]
            assert gradient is not None
            copy = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
            tensors[place] = copy.copy_(gradient)
        return self._in_order(tensors)

    def _zero_gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Without a step, the final states are the initial ones, and so are their gradients."""
        gradients: list[Tensor | None] = [
            _zeros_like(primal) if want and primal is not None else None
            for primal, want in zip(given, self._wanted, strict=False)
        ]
        if self._empty and not self._state_seqs:
            for i in range(self._first_state, self._first_lifted):
                final = given[i - self._first_lifted]  # the last ones are the states'
                if (zeros := gradients[i]) is not None and final is not None:
                    gradients[i] = zeros.copy_(final)
        return gradients


def _is_copied(gradient: Tensor) -> bool:
    """Whether an incoming gradient is copied before a kernel reads it.

    The memory of a lazily negated view is without the sign. An expanded one, as a sum over time has, would get a kernel
    of its own, whose compilation takes longer than many copies; and the last layer of a network is small. Zeros that
    autograd made may have no memory.
    """
    if gradient.is_neg() or gradient._is_zerotensor():
        return True
    strides = zip(gradient.shape, gradient.stride(), strict=True)
    return any(type(stride) is int and stride == 0 and size != 1 for size, stride in strides)  # a symbol is not 0


def _zeros_like(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape).as_strided(tensor.shape, strides_like(tensor))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _params(role: Role, entries: Sequence[object]) -> list[Port]:
    return [Port(role, i) for i in range(len(entries))]
