"""Roles of arguments and results, for graphs and for the kernels that are made from them."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Role(StrEnum):
    """Role of an argument or a result.

    The comments state the shapes in kernels: time is the first dimension of `[T, …]`, and checkpoints are the first
    dimension of `[rows, …]`. A graph is one step, with `STATE` or `GRAD_STATE` as arguments and as results. A step
    receives the state before the step and returns the state after the step. A VJP receives the gradient of the state
    after the step and returns the gradient of the state before the step.
    """

    INPUT = "input"  # [T, *step], read
    STATE = "state"  # initial state, [*step], read
    LIFTED = "lifted"  # captured tensor or value of the prologue, broadcast to [*step], read
    OUTPUT = "output"  # [T, *step], written
    STATE_SEQ = "state_seq"  # [T, *step], written: the state after each step
    FINAL_STATE = "final_state"  # [*step], written
    BITS = "bits"  # [T, bytes], written: an output of zeros and ones, with 8 elements of the step per uint8
    CHECKPOINT = "checkpoint"  # [rows, *step], the state before each segment but the first
    SAVED = "saved"  # [T, *step], an intermediate that the forward stores for the backward
    GRAD_OUTPUT = "grad_output"  # [T, *step], read
    GRAD_STATE_SEQ = "grad_state_seq"  # [T, *step], read
    GRAD_FINAL_STATE = "grad_final_state"  # [*step], read
    CAME_STATE = "came_state"  # flag of a VJP: True if the gradient of a new state is present
    GRAD_INPUT = "grad_input"  # [T, *step], written, or [T, programs] if each program sums over its elements
    GRAD_STATE = "grad_state"  # [*step], written: the gradient of the initial state
    GRAD_LIFTED = "grad_lifted"  # [*step], written: summed over time. Or [programs], if each program sums its elements
    # In a step with products (`StagedStep`), values of one step, of any shape:
    OPERAND = "operand"  # a pointwise function of the step's values, written as the operand of a product
    PRODUCT = "product"  # a product with a matrix
    LATER = "later"  # in a VJP: a product of a later step
    AHEAD = "ahead"  # a part of a stage that is computed earlier than the rest, for example while waiting for a product
    MATRIX = "matrix"  # computed from captured tensors alone, before the loop
    RING = "ring"  # [2, *step], passed from one step to the next. Even steps use one row, and odd steps the other row
    COUNTER = "counter"  # number of programs that have arrived at a common point, or a mark that a program gave up
    # In scans in segments of time, `[segments, *step]`:
    SEGMENT_START = "segment_start"  # the guessed state at the beginning of a segment
    SEGMENT_END = "segment_end"  # the state at the end of a segment
    SEGMENT_MAP = "segment_map"  # an entry of the affine map of cotangents, from the segment's end to its beginning
    SEGMENT_CARRIED = "segment_carried"  # the cotangent at a segment's end, from the segment after it
    SEGMENT_REPAIRS = "segment_repairs"  # [programs], written: number of recomputed pairs of an element and a segment

    __hash__ = str.__hash__  # is fast, because it is in C, unlike `Enum.__hash__`. Ports are often keys


class Port(NamedTuple):  # ports are often keys, and a tuple is fast to hash and to compare
    """One argument or result. `index` is its number within its role."""

    role: Role
    index: int  # type: ignore[assignment]  # replaces a tuple's method

    @property
    def name(self) -> str:
        """Name in graphs and generated sources, for human readers. No code parses it."""
        return f"{self.role.value}_{self.index}"


@cache
def ports(role: Role, count: int) -> tuple[Port, ...]:
    """The `count` ports of one role."""
    return tuple(Port(role, i) for i in range(count))
