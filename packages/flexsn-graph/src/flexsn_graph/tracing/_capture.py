"""Finds the tensors that a step function captures while it runs.

A core may use tensors that are not among its arguments: tensors in closures, `nn.Module` parameters and buffers,
tensors bound by `functools.partial`, and globals. The core runs on fake tensors, so each real tensor that reaches the
dispatcher is a captured tensor. `CaptureMode` replaces a captured tensor with a fake stand-in, and the tracer makes the
stand-in an argument.

Autograd works above the dispatcher and still receives the real tensor. Therefore, `torch.autograd.grad` can compute
the gradient of the real tensor, even through a `torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._location import SourceLocation, stack_trace, user_location
from flexsn_graph._torch_private import (
    FakeTensor,
    TorchDispatchMode,
    constant_value,
    custom_op_body,
    op_location_key,
    set_stack_trace,
    unrecorded,
)
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.errors import CaptureError, UnsupportedCoreError, WrittenViewError
from flexsn_graph.ir._ops import facts_of
from flexsn_graph.reads import Origin, Profile, resume, suspend
from flexsn_graph.tracing._captures import Captures
from flexsn_graph.tracing._origins import Origins
from flexsn_graph.tracing._prologue import CalledOp
from flexsn_graph.tracing._refusals import refuse_complex, refuse_higher_order, refuse_op, storage_of, written_by

_aten = torch.ops.aten

# `torch.tensor(0.5)` inside a core is a constant that the core creates, not a captured tensor.
_CONSTANT_OPS = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class UnexpectedWriteError(Exception):
    """An op was about to write to memory that a trial call must not write to."""


class CaptureMode(TorchDispatchMode):
    """A dispatch mode for runs of a core, which replaces captured tensors, and refuses ops that no scan can contain.

    Args:
        captures: the captured tensors that are known so far.
        may_add: True to record new captured tensors, as during discovery. If False, as during recording, a new captured
            tensor is refused, because the graph has no argument for this tensor.
        frozen: the core's arguments or the incoming gradients, which the core must not change in place.

    Attributes:
        trail: the calls of the core. The calls of different runs are compared.
        numbers_read: numbers of the values in `captures` that the step read.
        refusal: the error that this mode raised. The error is stored because TorchScript replaces it with another
            error.
    """

    supports_higher_order_operators = True  # such operators then reach `__torch_dispatch__`, which refuses them

    def __init__(self, captures: Captures, *, may_add: bool, frozen: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captures = captures
        self.may_add = may_add
        self.trail: list[tuple[str, ...]] = []
        self.numbers_read: set[int] = set()
        self.refusal: UnsupportedCoreError | None = None
        self._frozen = {storage_of(t) for t in (*frozen, *captures.stand_ins)}
        self._origins = Origins(frozen)
        self._apart: list[CalledOp] | None = None
        self._guarded: Collection[int] = ()
        self._deferred: dict[int, set[int]] = {}
        self._tied: set[int] = set()
        self._owners: list[Any] = []  # tensors and their memory, kept alive so that no other objects get their ids

    @contextmanager
    def apart(self, *, recorded: bool = False) -> Iterator[list[CalledOp]]:
        """Context in which an op that reads a captured value does not lift this value.

        The ops in this context become part of the step only if `recorded` is True.

        Yields:
            A list to which the ops are added.
        """
        outer_ops, numbers_read = self._apart, set(self.numbers_read)
        ops: list[CalledOp] = []
        self._apart = ops
        try:
            with nullcontext() if recorded else unrecorded():
                yield ops
        finally:
            self._apart, self.numbers_read = outer_ops, numbers_read

    @contextmanager
    def on_trial(self, guarded: Collection[int] = ()) -> Iterator[list[CalledOp]]:
        """Context for trial calls. Has the effects of `apart`, and removes the calls in this context from `trail`.

        Args:
            guarded: memory that the ops must not write to. `UnexpectedWriteError` is raised before a write.
        """
        num_calls, outer_guarded = len(self.trail), self._guarded
        self._guarded = guarded
        try:
            with self.apart() as ops:
                yield ops
        finally:
            del self.trail[num_calls:]
            self._guarded = outer_guarded

    def defer(self, tensor: Tensor, roots: set[int]) -> None:
        """Makes later uses of `tensor`, which was created in `apart`, count as reads of the values in `roots`."""
        self._deferred.setdefault(self._keep_alive(tensor), set()).update(roots)

    def freeze(self, tensor: Tensor) -> None:
        """Refuses later writes to a tensor."""
        self._frozen.add(self._keep_alive(tensor))

    def tie(self, tensors: Sequence[Tensor]) -> None:
        """Makes writes to one of these tensors raise `WrittenViewError`, because the other tensors would not change."""
        for tensor in tensors:
            self._tied.add(self._keep_alive(tensor))

    def _keep_alive(self, tensor: Tensor) -> int:
        """Returns the identity of a tensor's memory, and keeps the memory alive so that the identity stays unique."""
        self._owners += [tensor, tensor.untyped_storage()]
        return storage_of(tensor)

    def add_value(self, like: Tensor) -> int:
        """Records a value that is computed from captured tensors alone."""
        number = self.captures.add_value(like)
        self._frozen.add(storage_of(self.captures.stand_ins[number]))
        return number

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        profile = suspend()
        try:
            return self._call(func, args, kwargs or {}, profile)
        except UnsupportedCoreError as error:
            self.refusal = error
            raise
        finally:
            resume(profile)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], profile: Profile | None) -> Any:
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)  # frequent calls such as `prim.device`
        location = self._locate()
        refuse_higher_order(func, location)
        if func not in _CONSTANT_OPS:
            replace: Callable[[Any], Any] = lambda value: self._replace(value, location)  # noqa: E731
            args, kwargs = pytree.tree_map(replace, (args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        self.trail.append((str(func), *map(self._describe, leaves)))
        refuse_op(func, args, kwargs, self._frozen, location)
        body = custom_op_body(func) if facts_of(func) is None else None
        if body is not None:
            with self:
                resume(profile)
                return body(*args, **kwargs)
        writes = written_by(func, args, kwargs)
        written = {storage_of(t) for t in writes}
        if not written.isdisjoint(self._tied):
            raise WrittenViewError(
                "the core changes a value in place that is a view of another value, computed from captured tensors "
                f"alone ({func}). Change a copy.",
                str(func),
                location,
            )
        if not written.isdisjoint(self._guarded):
            raise UnexpectedWriteError
        self._record_reads(leaves)
        set_stack_trace(stack_trace(location, str(func)))
        args, kwargs = _move_to_one_device(leaves, args, kwargs, writes)
        results = func(*args, **kwargs)
        refuse_complex((leaves, results), str(func), location)
        self._origins.follow(leaves, results, location)
        if self._apart is not None:
            self._apart.append(CalledOp(func, args, results, frozenset(written)))
        return results

    @property
    def origin(self) -> Origin:
        """Functions that tell where a tensor of this run comes from."""
        return self._origins.origin(lambda t: not self.captures.is_captured(t), self.captures.has)

    def _record_reads(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                self.numbers_read |= self.sources_of(leaf)

    def sources_of(self, tensor: Tensor) -> set[int]:
        """Numbers of the captured values from which a tensor was computed.

        If the tensor has the memory of a captured value, the result contains only the number of this value.
        """
        storage = storage_of(self.captures.stand_in(tensor))
        number = self.captures.number_of(storage)
        return self._deferred.get(storage, set()) if number is None else {number}

    def _describe(self, value: Any) -> str:
        """Describes an op's argument. If a core makes the same calls in two runs, the descriptions are equal."""
        if not isinstance(value, Tensor):
            return repr(value)
        # A constant that the core creates is a new tensor in each run, so the value identifies the constant.
        return constant_value(value) if self.captures.is_captured(value) else ""

    def _locate(self) -> SourceLocation | None:
        in_backward, number = op_location_key()
        location = user_location()
        if in_backward:
            return location or self.captures.locations.get(number)
        if location is not None:
            # Several ops may have this number, but only the first of them has an autograd node.
            self.captures.locations.setdefault(number, location)
        return location

    def _replace(self, value: Any, location: SourceLocation | None) -> Any:
        if not isinstance(value, Tensor) or not self.captures.is_captured(value):
            return value
        return self.captures.stand_ins[self.number_of(value, location)]

    def number_of(self, value: Tensor, location: SourceLocation | None) -> int:
        """Returns the number of a captured tensor. Records the tensor if it is new."""
        if value.layout is not torch.strided:
            raise CaptureError(
                f"the core captures a tensor of layout {value.layout}: only dense tensors can be read.",
                "capture",
                location,
            )
        if value.retains_grad and not value.is_leaf:
            raise CaptureError(
                "the core captures a tensor on which `retain_grad()` was called: tracing would write its "
                "`.grad`. Capture it before that call.",
                "capture",
                location,
            )
        number = self.captures.find(value)
        if number is None:
            if not self.may_add:
                raise CaptureError(
                    "the core used a captured tensor that it did not use when it was traced before: "
                    f"{tuple(value.shape)} {value.dtype}. The core must use the same tensor objects in "
                    "every call. Create constants outside of the core.",
                    "capture",
                    location,
                )
            number = self.captures.add(value)
            self._frozen.add(storage_of(self.captures.stand_ins[number]))
        stand_in = self.captures.stand_ins[number]
        if (value.shape, value.dtype) != (stand_in.shape, stand_in.dtype):
            raise CaptureError(
                f"a captured tensor was {list(stand_in.shape)} {stand_in.dtype} when the core was traced "
                f"and is {list(value.shape)} {value.dtype} now: trace the core again.",
                "capture",
                location,
            )
        return number


def _move_to_one_device(
    leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], writes: Collection[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves CPU tensors without dimensions to the GPU of the other tensors.

    Eager mode accepts such tensors in one op with tensors on a GPU, but decompositions do not. For example, torch turns
    the number in `h[1:] = 0.25` into such a tensor.
    """
    tensors = [a for a in leaves if isinstance(a, Tensor)]
    gpus = {t.device for t in tensors if t.device.type != "cpu"}
    cpu_scalars = {id(t) for t in tensors if t.dim() == 0 and t.device.type == "cpu"} - {id(t) for t in writes}
    if len(gpus) != 1 or not cpu_scalars:
        return args, kwargs
    (device,) = gpus

    def move(tensor: Tensor) -> Tensor:
        return _aten._to_copy.default(tensor, device=device) if id(tensor) in cpu_scalars else tensor

    args, kwargs = pytree.tree_map_only(Tensor, move, (args, kwargs))
    return args, kwargs
