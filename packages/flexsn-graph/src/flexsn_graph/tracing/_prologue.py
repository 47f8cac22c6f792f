"""Computations on captured tensors alone that no step can perform. They run once, before the loop over time.

Examples are a row `w[0]` of a parameter, `w.softmax(0)`, and `w @ u`. The result of such a call is lifted like a
captured tensor. Pointwise ops on captured tensors remain in the step, where they cost almost nothing. Views of captured
tensors also remain in the step if a `LiftedLayout` can express them.

The computations before the loop form a graph, and their gradients form further graphs. Like the step itself, these
graphs are recorded below autograd, and include in-place operations and custom `autograd.Function`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from flexsn_graph._location import SourceLocation
from flexsn_graph.ir._ops import VIEW_OPS, Op
from flexsn_graph.ir._random import ELEMENT_WORD


class Hoists(Enum):
    """Selects the calls on captured tensors alone that run before the loop."""

    NOTHING = auto()
    IMPOSSIBLE_IN_STEP = auto()
    VIEWS_TOO = auto()  # for a tensor that the step reads in two layouts
    EVERYTHING = auto()  # for computations that cannot be differentiated in the step


# Ops that a step can compute although they do not have the tag of pointwise ops.
_STAYING = """
    alias clone copy detach empty empty_like expand fill full full_like lift_fresh lift_fresh_copy new_empty
    new_full new_ones new_zeros ones ones_like repeat scalar_tensor _to_copy zero zeros zeros_like
"""
_STAYING_OPS = frozenset(_STAYING.split())
_RESHAPES = VIEW_OPS | {torch.ops.aten._unsafe_view.default}


@dataclass(frozen=True, slots=True)
class CalledOp:
    """An op within a call. `writes` identifies the memory to which the op writes."""

    op: Op
    args: tuple[Any, ...]
    result: Any
    writes: frozenset[int] = frozenset()


def stays(called: CalledOp, hoists: Hoists, *, has_gradient: bool) -> bool:
    """True if an op that is called on captured tensors alone can be a part of the step."""
    if hoists is Hoists.EVERYTHING:
        return called.op is ELEMENT_WORD  # random integers, which a kernel computes much faster
    name = called.op._opname.rstrip("_") if called.writes else called.op._opname
    if torch.Tag.pointwise in called.op.tags or name in _STAYING_OPS:
        return True
    if called.op not in _RESHAPES or hoists is Hoists.VIEWS_TOO:
        return False
    # The gradient of a view that selects a part is zero outside of this part. No layout can express such a gradient.
    same_size = isinstance(called.result, Tensor) and called.result.numel() >= called.args[0].numel()
    return same_size or not has_gradient


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor among a call's arguments: the number of its value, and a flag that is True if it requires a gradient."""

    value: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call on captured tensors alone.

    Attributes:
        name: name of the function.
        results: for each leaf of the function's result, the number of the leaf's value, or `None` if the leaf is not a
            new tensor.
        reads: the values that the call needs.
        stays: True if the call is a part of the step.
        is_view: True if a result has the memory of an earlier value, as a view, with new content, or with a new
            autograd history.
        writes: True if the call changes its arguments.
        is_plain: False if the call changes its arguments or applies an `autograd.Function`.
        location: the line of the core that makes the call.
    """

    name: str
    results: tuple[int | None, ...]
    reads: set[int]
    stays: bool
    is_view: bool = False
    writes: bool = False
    is_plain: bool = True
    location: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class ComputedBefore:
    """Graphs that compute the lifted tensors that are not captured, and graphs of their gradients.

    Attributes:
        forward: `[*captured] -> [*values]`.
        backward: for each value, `[*captured, gradient of the value] -> [*gradients]`, or `None` if no gradient flows
            through the value.
        gradients: for each value, positions of the captured tensors whose gradients `backward` returns.
        first: the first call that computes a value.
        device: device of the first value at the time of recording.
        refusals: by index of a value, the error to raise if its gradient is required.
    """

    forward: fx.GraphModule
    backward: tuple[fx.GraphModule | None, ...]
    gradients: tuple[tuple[int, ...], ...]
    first: RecordedCall
    device: torch.device
    refusals: Mapping[int, Exception] = field(default_factory=dict)


class Prologue:
    """The function from the captured tensors to the lifted tensors.

    Args:
        tensors: the captured tensors that the function needs, by number.
        lifted: numbers of the values that the step reads.
        computed: graphs of the lifted values that are not captured, or `None` if all are captured.

    Attributes:
        captured: the captured tensors that are arguments of the function. They are the user's own objects.
    """

    def __init__(self, tensors: Mapping[int, Tensor], lifted: Sequence[int], computed: ComputedBefore | None) -> None:
        self.computed = computed
        self.captured = tuple(tensors.values())
        positions = {number: i for i, number in enumerate(tensors)}
        values = iter(range(len(lifted)))
        # The graphs require captured tensors with these strides on these devices.
        self._layouts = [] if computed is None else [(t.stride(), t.device) for t in self.captured]
        self._positions = [positions[n] if n in positions else len(positions) + next(values) for n in lifted]
        self._is_identity = computed is None and self._positions == list(range(len(self.captured)))

    def of(self, captured: Sequence[Tensor]) -> Prologue:
        """A copy of this prologue for other tensors, in the order of `captured`. `fits` must accept these tensors."""
        result = copy(self)
        result.captured = tuple(captured)
        return result

    def fits(self, captured: Sequence[Tensor]) -> bool:
        """True if the prologue accepts these tensors, whose shapes and dtypes have already been checked."""
        return all(
            t.stride() == stride and t.device == device
            for t, (stride, device) in zip(captured, self._layouts, strict=False)
        )

    def __call__(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Computes the lifted tensors. The result is differentiable if gradients are enabled."""
        values = tuple(captured)
        if self._is_identity:
            return values
        if self.computed is not None:
            if torch.is_grad_enabled() and any(t.requires_grad for t in captured):
                values += _Computed.apply(self.computed, *captured)
            else:
                with _as_recorded(self.computed):
                    values += tuple(self.computed.forward(*captured))
        return tuple(values[position] for position in self._positions)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: ComputedBefore, *captured: Tensor) -> tuple[Tensor, ...]:
        ctx.computed = computed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*captured)
        with _as_recorded(computed):
            values = tuple(computed.forward(*captured))
        # One tensor may represent two values, of which only one is differentiable. Each value gets its own tensor.
        values = tuple(v.clone() if any(v is other for other in values[:i]) else v for i, v in enumerate(values))
        differentiable = [bool(to) or i in computed.refusals for i, to in enumerate(computed.gradients)]
        ctx.mark_non_differentiable(
            *(v for v, is_differentiable in zip(values, differentiable, strict=True) if not is_differentiable)
        )
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Skips values without a gradient, because a gradient of zero times an infinite derivative would be NaN."""
        computed: ComputedBefore = ctx.computed
        sums: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        parts = zip(gradients, computed.backward, computed.gradients, strict=True)
        for number, (gradient, backward, targets) in enumerate(parts):
            if gradient is None:
                continue
            if number in computed.refusals:
                raise computed.refusals[number]
            if backward is None:
                continue
            with _as_recorded(computed):
                result = backward(*ctx.saved_tensors, gradient)
            for i, part in zip(targets, result, strict=True):
                sums[i] = part if sums[i] is None else sums[i] + part
        return None, *sums


def _as_recorded(computed: ComputedBefore) -> AbstractContextManager[object]:
    """Disables autocast, because its conversions are already in the graph."""
    kind = computed.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
