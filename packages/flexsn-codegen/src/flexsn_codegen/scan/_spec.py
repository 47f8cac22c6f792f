"""Specifications of the kernels of a scan. Each specification has one kernel, whose arguments include all sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexsn_codegen.source._source import InputLayout, StepLayout, Strided
from flexsn_graph import Flag


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """Specification of a forward kernel.

    Attributes:
        inputs: layout of each input sequence.
        states: layout of each initial state. `None` if the state starts at zero and has no argument.
        state_dtypes: dtype of each state.
        lifted: layout of each lifted tensor.
        lifted_like: for each lifted tensor, the index of the first lifted tensor with the same layout, sizes and
            strides. A program computes positions of elements once for all tensors with the same index. Empty if these
            indices are unknown.
        ends: True if steps have ends: where all inputs that count down are 0 or less, outputs are zeros and states stay
            the same. A program then stops at the step at which the last of its elements ends. The backward must have
            the same value of `ends`.
        follows: pairs of the index of a state and the index of a late input. The state is the value of the input at the
            previous step, or 0 before the first step. Therefore, the state has no checkpoints.
        outputs, state_seqs, final_states: for each tensor, True if it is written.
        saved: number of residuals that are written for the backward. They follow the new states in the step's results.
        segment: number of steps of a segment. The states before each segment, except for the first one, are written as
            checkpoints. The last segment may be shorter. `chunk` is a multiple of `segment`, unless T is one chunk. 0
            means that no checkpoints are written.
        chunk: number of steps whose loads are issued together.
        stages: number of chunks in flight. While one chunk is computed, the next `stages - 1` chunks are copied to
            shared memory. Several stages are faster if few warps run. 1 means that no chunks are copied.
        rest: False if T is always a multiple of `chunk`. The kernel then has less code, and is compiled faster.
        single: True if T is `chunk` and no input counts down. The kernel then has no loop over chunks.
        strided: layouts of those written tensors that are not dense.
        bits: for each output, True if it is written as bits, with or without its values. Each element has one bit,
            which is set if the element is not 0. Empty if no output is written as bits.
    """

    inputs: tuple[InputLayout, ...]
    states: tuple[StepLayout | None, ...]
    state_dtypes: tuple[torch.dtype, ...]
    lifted: tuple[StepLayout, ...]
    outputs: tuple[bool, ...]
    state_seqs: tuple[bool, ...]
    final_states: tuple[bool, ...]
    saved: int = 0
    segment: int = 0
    chunk: int = 8
    stages: int = 1
    rest: bool = True
    strided: Strided = ()
    bits: tuple[bool, ...] = ()
    lifted_like: tuple[int, ...] = ()
    ends: bool = False
    single: bool = False
    follows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """Specification of a backward kernel.

    Attributes:
        inputs, states, state_dtypes, lifted, lifted_like, ends, follows: see `ForwardSpec`.
        num_outputs: number of outputs of the step.
        grad_outputs, grad_state_seqs, grad_final_states: for each tensor, True if its gradient is present. Absent
            gradients are zero.
        gradients: for each of `[*inputs, *states, *lifted]`, the position of its gradient among the VJP's results, or
            `None` if the gradient is zero.
        grad_inputs, grad_states, grad_lifted: for each tensor, True if its gradient is written.
        lifted_dtypes: dtype of each lifted tensor. The tensor's gradient is summed in the dtype that the tensor has in
            registers.
        saved: number of residuals that the forward has written. The VJP takes residuals instead of states. If `saved`
            is 0 and the VJP takes states, the states are recomputed from checkpoints.
        chunk: number of steps of a chunk. If there are checkpoints, it is the `segment` of the forward.
        stages: see `ForwardSpec`.
        summed_inputs, summed_lifted: for each tensor, True if each program writes the sum of the gradient over its
            elements, not the gradient of each element. For an input, each program writes one sum per time step. Only
            operands that have one value for the whole step are summed. Empty if there are no such operands.
        rest, single: see `ForwardSpec`.
        rows: True if each program walks the rows of the step one after the other, and sums the gradients of lifted
            tensors over the rows before it writes these gradients. This requires lifted tensors that are the same for
            all rows, and a target that supports `rows`. The kernel takes the integers ``"ROWS"``, the number of rows,
            and ``"ROW"``, the number of elements of a row. The last row may be shorter. Gradients of inputs
            cannot be summed in this case.
        flags: the flags that the VJP takes.
        strided: layouts of those tensors that are not dense: checkpoints, residuals, received and written gradients.
    """

    inputs: tuple[InputLayout, ...]
    states: tuple[StepLayout | None, ...]
    state_dtypes: tuple[torch.dtype, ...]
    lifted: tuple[StepLayout, ...]
    num_outputs: int
    grad_outputs: tuple[bool, ...]
    grad_state_seqs: tuple[bool, ...]
    grad_final_states: tuple[bool, ...]
    gradients: tuple[int | None, ...]
    grad_inputs: tuple[bool, ...]
    grad_states: tuple[bool, ...]
    grad_lifted: tuple[bool, ...]
    lifted_dtypes: tuple[torch.dtype, ...]
    saved: int = 0
    chunk: int = 8
    stages: int = 1
    summed_inputs: tuple[bool, ...] = ()
    summed_lifted: tuple[bool, ...] = ()
    rest: bool = True
    strided: Strided = ()
    flags: tuple[Flag, ...] = ()
    lifted_like: tuple[int, ...] = ()
    rows: bool = False
    ends: bool = False
    single: bool = False
    follows: tuple[tuple[int, int], ...] = ()
