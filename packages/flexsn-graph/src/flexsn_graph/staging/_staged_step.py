"""Data of a step with matrix products: its stages, products and terms."""

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
    """Phase of a computation: for all steps at once before the loop over time, in it, or for all at once after it."""

    BEFORE = 0
    LOOP = 1
    AFTER = 2


@dataclass(frozen=True, slots=True)
class View:
    """A value of one step, seen through views.

    Attributes:
        source: port of the value.
        calls: the views, in order; empty for the whole value.
        shape, dtype: those of the last view.
    """

    source: Port
    calls: tuple[Call, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, value: Tensor) -> Tensor:
        """Applies the views to a value of one step."""
        seen: Tensor = replay(self.calls, value)
        return seen


@dataclass(frozen=True, slots=True)
class Stage:
    """A pointwise part of a step, which becomes one kernel.

    Attributes:
        phase: the phase in which it runs.
        graph: `[*INPUT, *LIFTED] -> [*OUTPUT]`, on values of `shape`, or of shapes that broadcast to it.
        shape: shape of the values that it writes.
        reads: the value of each input.
        writes: the destination of each output: all or a part of a value that this step writes.
    """

    phase: Phase
    graph: StepGraph
    shape: tuple[int, ...]
    reads: tuple[View, ...]
    writes: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a value of the step with a matrix, or a reduction of its rows.

    Attributes:
        phase: the phase in which it is computed.
        op: the torch op.
        args, kwargs: its arguments; for a reduction, `(value, dims, *numbers)` with negative dims. Values are `View`s.
            A value that is equal in all steps has role `MATRIX`.
        result: the destination: a value of its own, or a result of the step.
        shape, dtype: those of the result.
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
        """The values that it reads."""
        return tuple(a for a in self.args if isinstance(a, View))


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the gradient of a lifted tensor, as a sum over all steps.

    Attributes:
        lifted: index of the tensor.
        op: the product of two values of a step whose results are summed; `None` to sum a value itself.
        values: these values.
        calls: linear ops on the sum. A `View` among their arguments is a value that is equal in all steps.
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
        arguments, results: as for `StepGraph`. Results of role `GRAD_LIFTED` are in `terms` alone.
        parts: stages and products, in order; each phase is contiguous.
        values: shape and dtype of each value of one step that a part reads or writes.
        assembled: values that parts write a piece of; what no part writes of them is zero.
        matrices: `[*lifted] -> [*matrices]`, before the loop.
        saved: of a VJP: the forward's operands and products that it reads, as `SAVED`.
        terms: of a VJP.
        shifts: states that are another one some steps later: that one, which a part writes, and the number of steps.
        later: of a VJP: products of later steps that stages read: that product, and the number of steps.
        absent: of a VJP: the gradients of new states that do not come to the step that is walked first, see
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
        """True if the memory format of values matters for the speed of a library."""
        return any(product.is_convolution for product in self.products)

    @cached_property
    def sequences(self) -> frozenset[Port]:
        """The values that need memory for each step, because they are read outside of the loop."""
        found = {view.source for term in self.terms for view in term.values}
        found |= {source for source, _ in self.later.values()}
        for part in self.parts:
            if part.phase is not Phase.LOOP:
                writes = part.writes if isinstance(part, Stage) else (part.result,)
                found |= {view.source for view in (*part.reads, *writes)}
        return frozenset(found)
