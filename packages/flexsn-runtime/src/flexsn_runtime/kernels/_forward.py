"""The forward scan: chooses the kernel, allocates what it writes, launches it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flexsn_codegen import WORD, ForwardSpec
from flexsn_graph import Port, Residuals, Role, StepValue
from flexsn_runtime.launches._by_address import ByAddress
from flexsn_runtime.launches._launch import allocator
from flexsn_runtime.launches._launches import Launch, launch
from flexsn_runtime.operands._operands import Arguments, Operands, picker
from flexsn_runtime.plans._buckets import LaunchPlan
from flexsn_runtime.segments._choice import Choice, speculates, speculation
from flexsn_runtime.segments._forward import SegmentedForward
from flexsn_runtime.step._pointwise_step import Specialization


class ForwardResult(NamedTuple):
    """What a forward scan wrote. `state_seqs` or `final_states` is empty, as asked for."""

    outputs: tuple[Tensor, ...]
    state_seqs: tuple[Tensor, ...]
    final_states: tuple[Tensor, ...]
    checkpoints: tuple[Tensor, ...]

    @property
    def returned(self) -> tuple[Tensor, ...]:
        """`(*output_seqs, *state_seqs)` or `(*output_seqs, *final_states)`."""
        return (*self.outputs, *self.state_seqs, *self.final_states)


class ForwardScan:
    """A forward scan, prepared for arguments of one layout.

    Outputs, state sequences and final states have the format that `ScanFormat` says; what is for the backward is
    `[T, *step]` or `[rows, *step]`, in the order in which the kernel counts elements. So are bits of outputs, uint8
    `[T, bytes]`, 8 elements in a byte; where that is not the order of the output's own elements in memory, they are not
    written, and `[0, bytes]`.

    Args:
        arguments: any that have the layout: shapes, strides, dtypes, device, alignment.
        state_seqs: write the states after every step; otherwise the final ones alone.
        training: write what the backward needs: residuals, or else checkpoints to recompute from.
        residuals: as the step has them.
        spare_rows: rows of checkpoints to allocate beyond those that are written.
        padding: give the checkpoints one dimension, rows of contiguous steps, and so many elements beyond those that
            are written.
        plan: how it is launched; `None`: as the step has it.
        segments: walked side by side; `None`: none.
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
        segments: Choice | None = None,
    ) -> None:
        trace, num_steps = step.trace, arguments.num_steps
        shape = trace.step_shape
        self._device = arguments.device
        plan = step.plan(math.prod(shape)) if plan is None else plan
        form = step.format(arguments.inputs, arguments.states)
        sequence = kept_shape = (num_steps, *shape)
        self._written = [
            *_described(_values(Role.OUTPUT, trace.outputs), sequence, form.sequence),
            *_described(_values(Role.STATE_SEQ, trace.states if state_seqs else ()), sequence, form.sequence),
            *_described(_values(Role.FINAL_STATE, () if state_seqs else trace.states), shape, form.step),
        ]
        checkpoints = training and residuals is None
        segment = 0
        if checkpoints:
            # With `padding`, the number of rows is the same function of T where T is a symbol.
            segment = plan.backward.chunk if padding is not None else step.segment(plan, num_steps)
        ncl = math.prod(shape)
        row = -(-ncl // WORD) * (WORD // 8)
        bits = step.bits if _same_memory(sequence, form.sequence, (ncl, *form.step)) else ()
        written_bits = [(Port(Role.BITS, i), torch.uint8) for i, there in enumerate(step.bits) if there]
        self._written += _described(written_bits, (num_steps if bits else 0, row), (row, 1))
        kept_strides = (ncl, *form.step)
        if checkpoints:
            rows = checkpoint_rows(num_steps, segment) + spare_rows
            kept_shape = (rows, *shape)
            if padding is not None:
                kept_shape, kept_strides = (rows * ncl + padding,), (1,)
        if training:
            self._written += _described(step.kept(residuals), kept_shape, kept_strides)
        counts = [len(trace.outputs), *((len(trace.states), 0) if state_seqs else (0, len(trace.states)))]
        counts.append(len(written_bits))
        self._ends = [sum(counts[: i + 1]) for i in range(4)]
        self._first_state = trace.num_inputs
        self._launch: Launch | None = None
        if num_steps == 0 or 0 in shape:
            return
        config = plan.forward if training else plan.inference
        config, rest = step.chunks(config, num_steps, step.cost.num_ops)
        layouts = (trace if residuals is None else residuals).forward.layouts
        self._operands = operands = Operands(arguments, layouts, shape, form.order)
        spec = ForwardSpec(
            inputs=operands.inputs,
            states=operands.states,
            state_dtypes=step.state_dtypes,
            lifted=operands.lifted,
            lifted_like=operands.lifted_like,
            outputs=(True,) * len(trace.outputs),
            state_seqs=(state_seqs,) * len(trace.states),
            final_states=(not state_seqs,) * len(trace.states),
            saved=len(residuals.dtypes) if residuals else 0,
            segment=segment,
            chunk=config.chunk,
            stages=config.stages,
            rest=rest,
            strided=operands.strided(
                (param, size, strides) for param, size, strides, _ in self._written if param.role is not Role.BITS
            ),
            bits=bits,
        )
        assert not bits or config.block % WORD == 0, "a word belongs to one program"
        kernel = step.forward_kernel(spec, residuals)
        places = [*operands.params, *(param for param, *_ in self._written)]
        self._places = [places.index(param) for param in kernel.params]
        self._in_order = picker(self._places)
        self._moves = operands.moves
        integers = operands.sizes | step.core(residuals).integers
        self._launch = launch(kernel, integers, config, arguments.device)
        if segments is not None and speculates(step):
            self._launch = SegmentedForward(
                self._launch,
                kernel.params,
                step,
                spec,
                step.core(residuals),
                integers,
                config,
                arguments.device,
                speculation(step, segments),
            )

    @cached_property
    def _sequences(self) -> list[Callable[[], Tensor]]:
        """What allocates the results of `run`."""
        return self._allocators(0)

    @cached_property
    def _steps(self) -> list[Callable[[], Tensor]]:
        """What allocates the results of `run_single`."""
        return self._allocators(self._ends[0])

    def _allocators(self, steps: int) -> list[Callable[[], Tensor]]:
        """What allocates the results, the first `steps` of them without time."""
        allocate = allocator if self._launch is None else self._launch.allocator
        return [
            allocate(shape[i < steps :], strides[i < steps :], dtype=dtype, device=self._device)
            for i, (_, shape, strides, dtype) in enumerate(self._written)
        ]

    @property
    def first_kept(self) -> int:
        """Where in the result of `run` begins what is for the backward."""
        return self._ends[-1]

    @property
    def first_bits(self) -> int:
        """Where in the result of `run` begin the bits of outputs."""
        return self._ends[-2]

    @property
    def is_compiled(self) -> bool:
        """Whether there is nothing to compile any more."""
        return self._launch is None or self._launch.is_compiled

    def by_address(self) -> ByAddress | None:
        """How `run` launches, for who does it in its place; `None`: more is done than allocating and launching."""
        if self._launch is None or self._moves:
            return None
        return ByAddress.of(self._launch, self._places, self.results(), self._device)

    def results(self) -> list[Tensor]:
        """Tensors like those that `run` returns, without memory."""
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for _, shape, strides, dtype in self._written
        ]

    def __call__(self, arguments: Arguments) -> ForwardResult:
        """Runs it on arguments of that layout."""
        written = self.run(arguments.all)
        outputs, sequences, finals, _ = self._ends
        return ForwardResult(
            tuple(written[:outputs]),
            tuple(written[outputs:sequences]),
            tuple(written[sequences:finals]),
            tuple(written[self.first_kept :]),
        )

    def run_single(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        """As `run` of one step, on inputs `[*step]`, to `[*outputs, *final_states]`, `[*step]` each."""
        return self._run(arguments, self._steps)

    def run(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        """The same, to `[*output_seqs, *state_seqs or *final_states, *bits, *checkpoints or *residuals]`.

        Args:
            arguments: `[*inputs, *states, *lifted]`.
        """
        return self._run(arguments, self._sequences)

    def _run(self, arguments: Sequence[Tensor | None], allocators: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        written = [allocate() for allocate in allocators]
        if self._launch is not None:
            tensors = [*arguments, *written]
            if self._moves:
                self._operands.move(tensors)
            self._launch(self._in_order(tensors))
        else:
            _, sequences, finals, _ = self._ends
            for final, initial in zip(written[sequences:finals], arguments[self._first_state :], strict=False):
                final.zero_() if initial is None else final.copy_(initial)
        return written


def checkpoint_rows(num_steps: int, segment: int) -> int:
    """States are kept before each segment but the first."""
    return (num_steps - 1) // segment if num_steps > 0 else 0


def _same_memory(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether strides lead to the same places."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, others, strict=True))


def _values(role: Role, values: Sequence[StepValue]) -> list[tuple[Port, torch.dtype]]:
    return [(Port(role, i), value.dtype) for i, value in enumerate(values)]


def _described(
    values: Sequence[tuple[Port, torch.dtype]], shape: tuple[int, ...], strides: tuple[int, ...]
) -> list[tuple[Port, tuple[int, ...], tuple[int, ...], torch.dtype]]:
    return [(param, shape, strides, dtype) for param, dtype in values]
