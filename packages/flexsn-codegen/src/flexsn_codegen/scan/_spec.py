"""Specifications of what a scan kernel reads and writes. Each distinct one is one kernel; sizes are its arguments."""

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
        states: layout of each initial state; `None` starts at zero and has no argument.
        state_dtypes: of each state.
        lifted: layout of each lifted tensor.
        lifted_like: for each, the first one whose layout has the same numbers, so that a program computes where its
            elements are once for both. Empty: not known.
        ends: where all inputs that count down are 0 or less, outputs are zeros and states stay as they are. Programs
            end with the last of their elements then. A backward needs the same.
        follows: pairs of a state and a late input, whose value of the step before it is, and 0 at first: of such a
            state there are no checkpoints.
        outputs, state_seqs, final_states: which of them are written.
        saved: number of intermediates that follow the new states among the step's results and are written.
        segment: steps per segment, of which `chunk` is a multiple, unless T is one chunk; the last may be shorter.
            The states before each segment but the first are written. 0: no checkpoints.
        chunk: steps whose loads are issued together.
        stages: chunks in flight: while one is computed, the next `stages - 1` are copied to shared memory. Pays
            where few warps run. 1: none.
        rest: whether T may be no multiple of `chunk`. Without the code for it, there is less to compile.
        single: T is `chunk`, and no input counts down: the kernel has no loop over chunks.
        strided: layouts of what is written; what is not in it is dense.
        bits: which outputs are (also) written as bits, one for each element: whether it is not 0. Empty: none.
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
        inputs, states, state_dtypes, lifted, lifted_like, ends, follows: as in the forward.
        num_outputs: number of outputs of the step.
        grad_outputs, grad_state_seqs, grad_final_states: which gradients come in. Absent ones are zero.
        gradients: for each of `[*inputs, *states, *lifted]`, the position of its gradient among the VJP's
            results, or `None`: it is zero.
        grad_inputs, grad_states, grad_lifted: which gradients are written.
        lifted_dtypes: of each lifted tensor; its gradient is summed in the dtype that registers hold it in.
        saved: number of intermediates that the forward kept; the VJP takes them instead of the states. 0: if the
            VJP takes states, they are recomputed from checkpoints.
        chunk: the `segment` of the forward that wrote the checkpoints, or T.
        stages: as in the forward.
        summed_inputs, summed_lifted: of which gradients each program writes one number (per time step), the sum over
            its elements: for what is one number for the whole step. Empty: of none.
        rest, single: as in the forward.
        rows: each program walks the rows of the step, one after the other, and adds up over them what it writes of the
            gradients of lifted tensors, which are the same for all rows; the target must have `rows`. The kernel takes
            the integers ``"ROWS"`` and ``"ROW"``, the elements of a row; of the last row there may be fewer. No input's
            gradient that is written can be summed then.
        flags: those that the VJP takes.
        strided: layouts of what the forward kept, of the gradients that come in, and of those that are written; what
            is not in it is dense.
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
