"""The plan of a forward scan: the kernel, and the results that it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flexsn_codegen import WORD, ForwardSpec
from flexsn_graph import Port, Residuals, Role, StepValue
from flexsn_runtime.calls._plan import Allocation, Memory, Plan, PlanStep, launching
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.launches._launches import launch
from flexsn_runtime.operands._operands import Arguments, Operands, loaded_early
from flexsn_runtime.plans._buckets import LaunchPlan
from flexsn_runtime.segments._choice import AheadChoice, Choice
from flexsn_runtime.segments._in_segments import in_segments
from flexsn_runtime.segments._kernels import SerialScan
from flexsn_runtime.step._pointwise_step import Specialization


class ForwardResult(NamedTuple):
    """Results of a forward scan. Either `state_seqs` or `final_states` is empty."""

    outputs: tuple[Tensor, ...]
    state_seqs: tuple[Tensor, ...]
    final_states: tuple[Tensor, ...]
    checkpoints: tuple[Tensor, ...]

    @property
    def returned(self) -> tuple[Tensor, ...]:
        """Tuple `(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`."""
        return (*self.outputs, *self.state_seqs, *self.final_states)


class ForwardScan:
    """A forward scan, prepared for arguments of one layout.

    Outputs, state sequences and final states have the format of `ScanFormat`. Values for the backward have the shape
    `[T, *step]` or `[rows, *step]`. Their elements are in the order in which the kernel counts elements. Bits of
    outputs are uint8, with 8 elements per byte, in the same order; their shape is `[T, bytes]`. If the elements of the
    outputs have another order in memory, no bits are written, and the tensors of bits have the shape `[0, bytes]`.

    Args:
        arguments: example arguments. Their shapes, strides, dtypes, device and alignment are the layout.
        state_seqs: True to write the states after every step, False to write only the final states.
        training: True to write values for the backward: residuals, or checkpoints from which the backward recomputes
            states.
        residuals: residuals of the step; `None` to save checkpoints.
        spare_rows: additional rows of checkpoints to allocate.
        padding: number of elements to append to the checkpoints of each state, which are then one flat tensor; `None`
            for checkpoints `[rows, *step]`.
        plan: launch settings; `None` for the settings of the step.
        segments: choice of segments to compute in parallel; `None` to compute all steps in order.

    Attributes:
        plan: allocations and launches that each call performs.
        first_bits, first_kept: positions, among the results of `run`, of the first bits of outputs and of the first
            value for the backward.
    """

    def __init__(
        self,
        step: Specialization,
        arguments: Arguments,
        *,
        state_seqs: bool,
        training: bool,
        residuals: Residuals | None = None,
        spare_rows: int = 0,
        padding: int | None = None,
        plan: LaunchPlan | None = None,
        segments: Choice | AheadChoice | None = None,
    ) -> None:
        trace, num_steps = step.trace, arguments.num_steps
        shape = trace.step_shape
        self._device = arguments.device
        plan = step.plan(math.prod(shape)) if plan is None else plan
        form = step.format(arguments.inputs, arguments.states)
        sequence = saved_shape = (num_steps, *shape)
        self._written = [
            *_describe_results(_list_values(Role.OUTPUT, trace.outputs), sequence, form.sequence),
            *_describe_results(
                _list_values(Role.STATE_SEQ, trace.states if state_seqs else ()), sequence, form.sequence
            ),
            *_describe_results(_list_values(Role.FINAL_STATE, () if state_seqs else trace.states), shape, form.step),
        ]
        checkpoints = training and residuals is None
        segment = 0
        if checkpoints:
            # With `padding`, T may be a symbol, so one formula must give the number of rows for every T.
            segment = plan.backward.chunk if padding is not None else step.segment(plan, num_steps)
        ncl = math.prod(shape)
        row = -(-ncl // WORD) * (WORD // 8)
        bits = step.bits if _have_same_addresses(sequence, form.sequence, (ncl, *form.step)) else ()
        written_bits = [(Port(Role.BITS, i), torch.uint8) for i, is_written in enumerate(step.bits) if is_written]
        self._written += _describe_results(written_bits, (num_steps if bits else 0, row), (row, 1))
        saved_strides = (ncl, *form.step)
        if checkpoints:
            rows = checkpoint_rows(num_steps, segment) + spare_rows
            rows += sum(-(-delays.most // segment) for delays in step.late.values())  # plus rows before the first step
            saved_shape = (rows, *shape)
            if padding is not None:
                saved_shape, saved_strides = (rows * ncl + padding,), (1,)
        if training:
            self._written += _describe_results(step.kept(residuals), saved_shape, saved_strides)
        counts = [len(trace.outputs), *((len(trace.states), 0) if state_seqs else (0, len(trace.states)))]
        counts.append(len(written_bits))
        self._ends = [sum(counts[: i + 1]) for i in range(4)]
        self.first_bits, self.first_kept = self._ends[2:]
        if num_steps == 0 or 0 in shape:
            finals = range(self._ends[1], self._ends[2])
            self._make_plans((_Initial(trace.num_inputs, len(arguments.all), tuple(finals)),), allocator)
            return
        config = plan.forward if training else plan.inference
        config, rest, single = step.chunks(config, num_steps, step.cost.num_ops)
        layouts = (trace if residuals is None else residuals).forward.layouts
        operands = Operands(arguments, layouts, shape, form.order, step.counts, step.late)
        spec = ForwardSpec(
            inputs=loaded_early(operands.inputs, arguments.inputs, config.stages),
            states=operands.states,
            state_dtypes=step.state_dtypes,
            lifted=operands.lifted,
            lifted_like=operands.lifted_like,
            ends=step.ends and any(layout.counts_down for layout in operands.inputs),
            follows=step.follows,
            outputs=(True,) * len(trace.outputs),
            state_seqs=(state_seqs,) * len(trace.states),
            final_states=(not state_seqs,) * len(trace.states),
            saved=len(residuals.dtypes) if residuals else 0,
            segment=segment,
            chunk=config.chunk,
            stages=config.stages,
            rest=rest,
            single=single and not any(layout.counts_down for layout in operands.inputs),
            strided=operands.strided(
                (param, size, strides) for param, size, strides, _ in self._written if param.role is not Role.BITS
            ),
            bits=bits,
        )
        assert not bits or config.block % WORD == 0, "a word belongs to one program"
        kernel = step.forward_kernel(spec, residuals)
        places = [*operands.params, *(param for param, *_ in self._written)]
        integers = operands.sizes | step.core(residuals).integers
        launched = launch(kernel, integers, config, arguments.device)
        if segments is not None:
            min_steps = segments.rule.launched if isinstance(segments, Choice) else 1
            scan = SerialScan(launched, kernel.params, step, spec, integers, config, arguments.device, min_steps)
            launched = in_segments(scan, step.core(residuals), segments)
        kernel_places = [places.index(param) for param in kernel.params]
        self._make_plans(launching(operands, launched, kernel_places, len(places)), launched.allocator)

    def _make_plans(self, steps: Sequence[PlanStep], allocator: Callable[..., Callable[[], Tensor]]) -> None:
        allocations = [Allocation(shape, strides, dtype) for _, shape, strides, dtype in self._written]
        self.plan = Plan.of(self._device, allocations, steps, allocator)
        outputs = [Allocation(shape[1:], strides[1:], dtype) for shape, strides, dtype in allocations[: self._ends[0]]]
        self._single = partial(Plan.of, self._device, [*outputs, *allocations[self._ends[0] :]], steps, allocator)

    @cached_property
    def single(self) -> Plan:
        """The plan for one step. It returns `[*outputs, *final_states]`. Inputs and results are `[*step]`."""
        return self._single()

    def results(self) -> list[Tensor]:
        """Returns tensors like the plan's results, but without memory."""
        return [allocation.like() for allocation in self.plan.allocations if allocation is not None]

    def __call__(self, arguments: Arguments) -> ForwardResult:
        """Runs the scan on arguments of this layout."""
        written = self.run(arguments.all)
        outputs, sequences, finals, _ = self._ends
        return ForwardResult(
            tuple(written[:outputs]),
            tuple(written[outputs:sequences]),
            tuple(written[sequences:finals]),
            tuple(written[self.first_kept :]),
        )

    def run(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        """Runs the plan. Returns `[*output_seqs, *state_seqs or *final_states, *bits, *checkpoints or *residuals]`.

        Args:
            arguments: `[*inputs, *states, *lifted]`.
        """
        return cast(list[Tensor], self.plan.run(arguments))


class _Initial(NamedTuple):
    """The operation of a scan of zero steps. Final states are copies of initial states, or zeros.

    Attributes:
        states: position of the first initial state.
        num_arguments: number of tensors that a call takes.
        finals: positions of the final states among the results.
    """

    states: int
    num_arguments: int
    finals: tuple[int, ...]

    def __call__(self, memory: Memory) -> None:
        for i, place in enumerate(self.finals):
            final, initial = memory[self.num_arguments + place], memory[self.states + i]
            assert final is not None
            final.zero_() if initial is None else final.copy_(initial)


def checkpoint_rows(num_steps: int, segment: int) -> int:
    """Returns the number of rows of checkpoints. There is a row before each segment except the first."""
    return (num_steps - 1) // segment if num_steps > 0 else 0


def _have_same_addresses(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """True if both sets of strides give each element the same address."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, others, strict=True))


def _list_values(role: Role, values: Sequence[StepValue]) -> list[tuple[Port, torch.dtype]]:
    return [(Port(role, i), value.dtype) for i, value in enumerate(values)]


def _describe_results(
    values: Sequence[tuple[Port, torch.dtype]], shape: tuple[int, ...], strides: tuple[int, ...]
) -> list[tuple[Port, tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return [(param, shape, strides, dtype) for param, dtype in values]
