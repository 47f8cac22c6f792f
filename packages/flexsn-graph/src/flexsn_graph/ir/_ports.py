"""Roles of arguments and results, of a graph and of the kernels made of it."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Role(StrEnum):
    """Role of an argument or a result.

    Of a kernel: `[T, …]` leads with time, `[rows, …]` with checkpoints. A graph is one step, and has `STATE` and
    `GRAD_STATE` on both sides: the state before the step comes in, the one after it goes out; of a VJP, the gradient
    of the latter comes in, and that of the former goes out.
    """

    INPUT = "input"  # [T, *step], read
    STATE = "state"  # initial state, [*step], read
    LIFTED = "lifted"  # captured tensor, broadcast to [*step], read
    OUTPUT = "output"  # [T, *step], written
    STATE_SEQ = "state_seq"  # [T, *step], written: the state after each step
    FINAL_STATE = "final_state"  # [*step], written
    BITS = "bits"  # [T, bytes], written: an output of zeros and ones, 8 elements of the step in each uint8
    CHECKPOINT = "checkpoint"  # [rows, *step], the state before each segment but the first
    SAVED = "saved"  # [T, *step], an intermediate that the forward keeps for the backward
    GRAD_OUTPUT = "grad_output"  # [T, *step], read
    GRAD_STATE_SEQ = "grad_state_seq"  # [T, *step], read
    GRAD_FINAL_STATE = "grad_final_state"  # [*step], read
    CAME_STATE = "came_state"  # of a VJP: whether the gradient of a new state came, or counts as absent
    GRAD_INPUT = "grad_input"  # [T, *step], written; or, summed over the step's elements of a program, [T, programs]
    GRAD_STATE = "grad_state"  # [*step], written: the gradient of the initial state
    GRAD_LIFTED = "grad_lifted"  # [*step], written: summed over time, not yet over the step; or [programs]
    # Of a step with products (`StagedStep`), values of one step, of any shape:
    OPERAND = "operand"  # a pointwise function of the step's values, written for a product to read
    PRODUCT = "product"  # a product with a matrix
    LATER = "later"  # of a VJP: a product of a later step
    AHEAD = "ahead"  # a part of a stage that is computed while a product is waited for
    MATRIX = "matrix"  # made of captured tensors alone, before the loop
    RING = "ring"  # [2, *step], what goes from one step to the next, as the even and the odd steps find it
    COUNTER = "counter"  # how many programs that wait for each other have arrived; whether any gave up
    # Of scans in segments of time, `[segments, *step]`:
    SEGMENT_START = "segment_start"  # the state that a segment began with, a guess
    SEGMENT_END = "segment_end"  # the state that it ended with
    SEGMENT_MAP = "segment_map"  # an entry of the affine map of cotangents, from the segment's end to its beginning
    SEGMENT_CARRIED = "segment_carried"  # the cotangent that comes to a segment's end from the one behind it
    SEGMENT_REPAIRS = "segment_repairs"  # [programs], written: elements times segments that were computed again

    __hash__ = str.__hash__  # an Enum's own is a function of Python's, and ports are keys everywhere


class Port(NamedTuple):  # as a key: a tuple's hash and comparison are no functions of Python's
    """One argument or result: `index` counts within its role."""

    role: Role
    index: int  # type: ignore[assignment]  # replaces a tuple's method

    @property
    def name(self) -> str:
        """Name in graphs and generated sources, for readers alone: no role is derived from a name."""
        return f"{self.role.value}_{self.index}"


@cache
def ports(role: Role, count: int) -> tuple[Port, ...]:
    """All of one role."""
    return tuple(Port(role, i) for i in range(count))
