"""Specifications of a scan kernel's operands. Each distinct specification has one kernel, to which sizes are passed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexsn_codegen.source._source import InputLayout, StepLayout, Strided
from flexsn_graph import Flag


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """A forward scan.

    Attributes:
        inputs: layout of each input sequence.
        states: layout of each initial state. `None` if the state starts at zero and has no argument.
        state_dtypes: dtype of each state.
        lifted: layout of each lifted tensor.
        lifted_like: for each lifted tensor, the index of the first lifted tensor with the same layout, sizes and
            strides. A program computes the positions of the elements of both tensors once. Empty if this is unknown.
        ends: True if outputs are zeros and states stay the same where all inputs that count down are 0 or less. In this
            case, a program ends when the last of its elements ends. The backward must have the same value.
        follows: pairs of a state and a late input. The state is the input's value at the previous step, and 0 at first,
            so it has no checkpoints.
        outputs, state_seqs, final_states: for each tensor, True if it is written.
        saved: number of intermediates to write for the backward. They follow the new states in the step's results.
        segment: steps per segment. `chunk` is a multiple of it, unless T is one chunk. The last segment may be shorter.
            The states before each segment except for the first one are written. 0 means no checkpoints.
        chunk: number of steps whose loads are issued together.
        stages: chunks in flight. While one chunk is computed, the next `stages - 1` chunks are copied to shared memory.
            Several stages are faster if few warps run. 1 means that no chunks are copied.
        rest: False if T is always a multiple of `chunk`, so that less code has to be compiled.
        single: True if T is `chunk` and no input counts down. The kernel then has no loop over chunks.
        strided: layouts of written tensors. A tensor without a layout here is dense.
        bits: for each output, True if it is (also) written as bits. Each element has one bit, which is set if the
            element is not 0. Empty if no output is written as bits.
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
    """A backward scan.

    Attributes:
        inputs, states, state_dtypes, lifted, lifted_like, ends, follows: see `ForwardSpec`.
        num_outputs: number of outputs of the step.
        grad_outputs, grad_state_seqs, grad_final_states: for each tensor, True if its gradient is present. Absent
            gradients are zero.
        gradients: for each of `[*inputs, *states, *lifted]`, the position of its gradient among the VJP's results, or
            `None` if it is zero.
        grad_inputs, grad_states, grad_lifted: for each tensor, True if its gradient is written.
        lifted_dtypes: dtype of each lifted tensor. Its gradient is summed in the dtype in which registers hold it.
        saved: number of intermediates that the forward kept. The VJP takes these intermediates instead of the states.
            If `saved` is 0 and the VJP takes states, the states are recomputed from checkpoints.
        chunk: the `segment` of the forward that wrote the checkpoints, or T.
        stages: see `ForwardSpec`.
        summed_inputs, summed_lifted: for each tensor, True if each program writes only one number, the gradient's
            sum over the program's elements. For inputs, each program writes such a number for each time step. This is
            for operands that have one number for the whole step. Empty if there are none.
        rest, single: see `ForwardSpec`.
        rows: True if each program walks the rows of the step one after the other, and sums the gradients of lifted
            tensors over the rows before it writes these gradients. This requires lifted tensors that are the same for
            all rows, and a target that has `rows`. The kernel takes the integers ``"ROWS"`` and ``"ROW"``, the number
            of elements of a row. The last row may be shorter. Gradients of inputs cannot be summed in this case.
        flags: the flags that the VJP takes.
        strided: layouts of tensors that the forward kept, of incoming gradients, and of written gradients. A tensor
            without a layout here is dense.
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
