"""What a core computes from captured tensors alone, and no step can: computed once, before the loop over time.

A row `w[0]` of a parameter, `w.softmax(0)`, `w @ u`: such a call is remembered, and its result lifted as if it had
been captured. Ordinary autograd differentiates the call, outside of the step. Pointwise ops on captured tensors
stay in the step, and so do views that a `LiftedLayout` can express: there they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexsn_graph._location import SourceLocation
from flexsn_graph._ops import VIEW_OPS, Op


class Hoists(Enum):
    """Which calls on captured tensors alone are done before the loop."""

    NOTHING = auto()
    WHAT_NO_STEP_CAN = auto()
    VIEWS_TOO = auto()  # for a tensor that is read in two layouts


# Not pointwise by their tag, but nothing that a step could not do.
_STAYING = """
    alias clone copy detach empty empty_like expand fill full full_like lift_fresh lift_fresh_copy new_empty
    new_full new_ones new_zeros ones ones_like repeat scalar_tensor _to_copy zeros zeros_like
"""
_STAYING_OPS = frozenset(_STAYING.split())
_RESHAPES = VIEW_OPS | {torch.ops.aten._unsafe_view.default}


@dataclass(frozen=True, slots=True)
class CalledOp:
    """An op that a call came down to."""

    op: Op
    args: tuple[Any, ...]
    result: Any


def stays(called: CalledOp, hoists: Hoists, *, has_gradient: bool) -> bool:
    """Whether an op, called on captured tensors alone, can be a part of the step."""
    if torch.Tag.pointwise in called.op.tags or called.op._opname in _STAYING_OPS:
        return True
    if called.op not in _RESHAPES or hoists is Hoists.VIEWS_TOO:
        return False
    # The gradient of a part would be zero elsewhere, which no layout can say.
    same_size = isinstance(called.result, Tensor) and called.result.numel() >= called.args[0].numel()
    return same_size or not has_gradient


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor in a call's arguments: the number of a captured or computed value."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call on captured tensors alone.

    Attributes:
        results: for each leaf of what the function returns, the number of the value that it is; `None`: not a
            tensor.
        stays: whether it is a part of the step; then it is made before the loop only if others need it there.
        has_gradient: whether it can have one.
        autocast: devices and dtypes of the autocast that the core makes it under.
        location: where the core makes it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    stays: bool
    has_gradient: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    location: SourceLocation | None

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", str(self.function))

    def run(self, values: dict[int, Tensor]) -> None:
        """Adds the results to `values`."""
        fetch: Callable[[Any], Any] = lambda a: values[a.value] if isinstance(a, Ref) else a  # noqa: E731
        args, kwargs = pytree.tree_map(fetch, (self.args, self.kwargs))
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            leaves = pytree.tree_leaves(self.function(*args, **kwargs))
        values.update({i: leaf for i, leaf in zip(self.results, leaves, strict=True) if i is not None})

    def reads(self) -> set[int]:
        """The values that it needs."""
        return {a.value for a in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(a, Ref)}


class Prologue:
    """From the captured tensors to the lifted ones.

    Args:
        calls: everything that the core computed from captured tensors alone, in order.
        tensors: the captured tensors, by number.
        lifted: numbers of the values that the step reads.

    Attributes:
        captured: the tensors that it takes, the user's own objects.
        calls: what it does, in order. None: the lifted tensors are the captured ones.
    """

    def __init__(
        self, calls: Iterable[Call], tensors: Mapping[int, Tensor], lifted: Sequence[int]
    ) -> None:
        self._lifted = tuple(lifted)
        needed = set(lifted)
        kept: list[Call] = []
        for call in reversed(list(calls)):
            if not needed.isdisjoint(call.results):
                kept.append(call)
                needed |= call.reads()
        self.calls = tuple(reversed(kept))
        self._numbers = tuple(i for i in tensors if i in needed)
        self.captured = tuple(tensors[i] for i in self._numbers)

    def __call__(self, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The lifted tensors. Differentiable, when gradients are switched on."""
        values = dict(zip(self._numbers, captured, strict=True))
        if self.calls:
            device = captured[0].device.type
            off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
            with off:  # as when it was traced
                for call in self.calls:
                    call.run(values)
        return tuple(values[i] for i in self._lifted)
