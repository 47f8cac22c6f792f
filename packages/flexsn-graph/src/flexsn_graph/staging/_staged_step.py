"""Data of a step with matrix products: stages, products and terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import SourceLocation
from flexsn_graph.ir._ops import Op
from flexsn_graph.ir._ports import Port
from flexsn_graph.ir._products import CONVOLUTION, REDUCTIONS, Call, replay
from flexsn_graph.ir._step_graph import StepGraph


class Phase(IntEnum):
    """The phase of a computation. In the phases `BEFORE` and `AFTER` the loop, all steps are computed at once."""

    BEFORE = 0
    LOOP = 1
    AFTER = 2


@dataclass(frozen=True, slots=True)
class View:
    """A value of one step, after a chain of views.

    Attributes:
        source: port of the value.
        calls: the views, in order. Empty for the whole value.
        shape, dtype: shape and dtype of the value after all views.
    """

    source: Port
    calls: tuple[Call, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, value: Tensor) -> Tensor:
        """Applies the views to a value of one step."""
        result: Tensor = replay(self.calls, value)
        return result


@dataclass(frozen=True, slots=True)
class Stage:
    """A pointwise part of a step, which becomes one kernel.

    Attributes:
        phase: the phase in which the stage runs.
        graph: `[*INPUT, *LIFTED] -> [*OUTPUT]`, on values whose shape is `shape` or broadcasts to `shape`.
        shape: shape of the values that the stage writes.
        reads: the value of each input.
        writes: the destination of each output: a value that this step writes, or a part of such a value.
    """

    phase: Phase
    graph: StepGraph
    shape: tuple[int, ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a value of the step with a matrix, or a reduction of the rows of a value.

    Attributes:
        phase: the phase in which the product is computed.
        op: the torch op.
        args, kwargs: arguments of the op. For a reduction, the arguments are `(value, dims, *numbers)` with negative
            dims. Values are `View`s. A value that is computed from captured tensors alone has the role `MATRIX`.
        result: the destination: a value of the role `PRODUCT`, or a result of the step.
        shape, dtype: shape and dtype of the result.
        factor_shapes: shapes of the two factors, or of the reduced value.
        name: the op that the user's code called.
        location: the line of this call.
    """

    phase: Phase
    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: View
    shape: tuple[int, ...]
    dtype: torch.dtype
    factor_shapes: tuple[tuple[int, ...], ...]
    name: str
    location: SourceLocation | None

    @property
    def is_reduction(self) -> bool:
        """True for a reduction of rows, which has no matrix."""
        return self.op in REDUCTIONS

    @property
    def is_convolution(self) -> bool:
        """True for a convolution, whose matrix is a weight."""
        return self.op is CONVOLUTION

    @property
    def kind(self) -> str:
        """Noun for messages: ``"product"``, ``"convolution"`` or ``"reduction of rows"``."""
        return "reduction of rows" if self.is_reduction else "convolution" if self.is_convolution else "product"

    @property
    def reads(self) -> tuple[View, ...]:
        """The values that the product reads."""
        return tuple(a for a in self.args if isinstance(a, View))


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the gradient of a lifted tensor, as a sum over all steps.

    Attributes:
        lifted: index of the tensor.
        op: the op that multiplies two values of a step. The products are summed. `None` to sum a single value.
        values: the two values, or the single value.
        calls: linear ops that are applied to the sum. An argument that is a `View` has the same value in all steps.
        numbers: arguments of the op after the values.
    """

    lifted: int
    op: Op | None
    values: tuple[View, ...]
    calls: tuple[Call, ...]
    numbers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StagedStep:
    """A step, or its VJP, as stages and products.

    Attributes:
        arguments, results: see `StepGraph`. Results of the role `GRAD_LIFTED` are sums of `terms`, and no part
            writes them.
        parts: stages and products in the order of execution. The parts of a phase are contiguous.
        values: shape and dtype of each value of one step that a part reads or writes.
        assembled: values that several parts write, one piece each. All other elements of these values are zero.
        matrices: `[*lifted] -> [*matrices]`, computed before the loop.
        saved: for a VJP, the operands and products of the forward that the VJP reads as `SAVED`.
        terms: for a VJP, the parts of gradients of lifted tensors.
        shifts: states that are delayed copies. Maps a state to the value that a part writes and the delay in steps.
        later: for a VJP, values of later steps that stages read. Maps the port of such a value to the product whose
            result it is, and to the number of steps by which this product is later than the stage.
        absent: for a VJP, the gradients of new states that are absent at the first step of the backward. See
            `absent_at_first`.
    """

    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    parts: tuple[Stage | Product, ...]
    values: Mapping[Port, tuple[tuple[int, ...], torch.dtype]]
    assembled: frozenset[Port]
    matrices: fx.GraphModule
    num_matrices: int
    saved: tuple[Port, ...] = ()
    terms: tuple[Term, ...] = ()
    absent: frozenset[Port] = frozenset()
    shifts: Mapping[Port, tuple[Port, int]] = field(default_factory=dict)
    later: Mapping[Port, tuple[Port, int]] = field(default_factory=dict)

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(part for part in self.parts if isinstance(part, Product))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part for part in self.parts if isinstance(part, Stage))

    @cached_property
    def has_convolutions(self) -> bool:
        """True if the step has convolutions, whose speed depends on the memory format of values."""
        return any(product.is_convolution for product in self.products)

    @cached_property
    def sequences(self) -> frozenset[Port]:
        """The values that need memory for all steps, because phases other than the loop or other steps use them."""
        results = {view.source for term in self.terms for view in term.values}
        results |= {source for source, _ in self.later.values()}
        for part in self.parts:
            if part.phase is not Phase.LOOP:
                writes = part.writes if isinstance(part, Stage) else (part.result,)
                results |= {view.source for view in (*part.reads, *writes)}
        return frozenset(results)
