"""Observes a core's calls of torch functions, and handles calls that read a value or use captured tensors alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._location import SourceLocation, user_location
from flexsn_graph._torch_private import TorchFunctionMode, autocast_now, reachable_nodes
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.ir._ops import Op
from flexsn_graph.reads import is_library
from flexsn_graph.tracing._capture import CaptureMode, UnexpectedWriteError
from flexsn_graph.tracing._checks import WITHOUT_CHECKS
from flexsn_graph.tracing._extremes import as_reductions
from flexsn_graph.tracing._prologue import CalledOp, Hoists, RecordedCall, Ref, stays
from flexsn_graph.tracing._refusals import (
    HOOKS,
    READ_ONCE,
    VALUE_READS,
    make_hook_error,
    make_out_error,
    make_value_error,
    storage_of,
)
from flexsn_graph.tracing._sizes import OF_SIZES, depends_on_batch


@dataclass(frozen=True, slots=True)
class _KnownValue:
    """A tensor of the core that was computed from captured tensors alone, and its state at the time of recording.

    Attributes:
        number: number of the tensor's recorded value. The autograd history is part of the value.
        memory: the tensor's recorded memory, kept alive so that no other memory gets the id `storage`.
        replaced: True if a call that also has other tensors as arguments receives the value that was computed before
            the loop instead of this tensor.
    """

    number: int
    tensor: Tensor
    version: int
    storage: int
    memory: Any
    requires_grad: bool
    node: Any
    replaced: bool

    @classmethod
    def of(cls, number: int, tensor: Tensor, *, replaced: bool) -> _KnownValue:
        storage, memory = storage_of(tensor), tensor.untyped_storage()
        return cls(number, tensor, tensor._version, storage, memory, tensor.requires_grad, tensor.grad_fn, replaced)

    def holds(self) -> bool:
        """True if the tensor still has this value, possibly with another autograd history."""
        return self.tensor._version == self.version and storage_of(self.tensor) == self.storage

    def is_same(self) -> bool:
        """True if the tensor still has this value with this autograd history."""
        tensor = self.tensor
        return self.holds() and tensor.requires_grad == self.requires_grad and tensor.grad_fn is self.node


class CoreCalls(TorchFunctionMode):
    """Replaces values that the core computes from captured tensors alone, and that no step can compute, with variables.

    For autograd, the variables are leaves. The gradient of the step ends at them, and continues outside of the step
    through the computation before the loop.

    Args:
        mode: the dispatch mode under which the core runs.
        hoists: selects the calls whose results are replaced.
        keep_views: True to replace a view of a computed value where the core combines the view with other values. An
            in-place op on the view then changes all views. If False, a view is replaced where the core creates the
            view, and an in-place op on the view is refused.
        is_complete: True to replace no results. The core runs unchanged, and `computed` stores the computed values.
        arguments: the core's arguments, on which no value computed before the loop depends. `None` in a backward pass.
        note: called with a name and a location when the core reads a tensor's property that may differ in later calls.

    Attributes:
        variables: the variables that require a gradient, by the number of the replaced value. Captured tensors with an
            autograd history are also replaced.
        computed: the computed values that are lifted, with their histories, by number.
        is_core_running: True until the core has returned. Afterwards, the tracer itself reads the results.
    """

    def __init__(
        self,
        mode: CaptureMode,
        hoists: Hoists,
        *,
        keep_views: bool = False,
        is_complete: bool = False,
        arguments: Sequence[Tensor] | None = None,
        note: Callable[[str, SourceLocation | None], None] = lambda name, location: None,
    ) -> None:
        super().__init__()
        self.variables: dict[int, Tensor] = {}
        self.computed: dict[int, Tensor] = {}
        self.is_core_running = True
        self._mode = mode
        self._captures = mode.captures
        self._hoists = hoists
        self._keep_views = keep_views
        self._is_complete = is_complete
        self._arguments = arguments
        self._note = note
        # Keys are ids of tensors. The tensors are kept alive, so that no other tensors get their ids or their memory.
        self._known_values: dict[int, _KnownValue] = {}
        self._nodes: dict[Any, int] = {}
        self._fixed_nodes: dict[Any, bool] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        func = WITHOUT_CHECKS.get(func, func)
        reductions = as_reductions(func, args, kwargs)
        if reductions is not None and self.is_core_running:
            # If `func` is an `Op`, a compiler has captured the call in a graph, whose tensors do not belong to a step.
            if isinstance(func, Op):
                return reductions(*args, **kwargs)
            with self:  # nested calls on captured tensors alone can still be hoisted
                return reductions(*args, **kwargs)
        if func in VALUE_READS:
            raise make_value_error(f"Tensor.{func.__name__}", user_location())
        if func in READ_ONCE:
            self._note_read(func, args)
        if func in OF_SIZES and self.is_core_running and not _is_own(sys._getframe(1)):
            tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
            step_ranks = [t.dim() for t in tensors if not self._captures.is_captured(t)]
            if step_ranks or not tensors:
                self._captures.reads_sizes |= depends_on_batch(func, args, kwargs, max(step_ranks, default=0))
        if self._hoists is Hoists.NOTHING:
            return func(*args, **kwargs)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if kwargs.get("out") is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise make_out_error(func.__name__, user_location())
        if func not in _PROPERTY_GETTERS:
            for tensor in tensors:
                self._drop_history(tensor)  # must precede all unrecorded ops on the tensor
        is_known = [self._captures.is_captured(t) or self._find(t) is not None for t in tensors]
        if is_known and func in HOOKS and is_known[0]:
            raise make_hook_error(func.__name__, user_location())
        if all(is_known) and (is_known or func in _FACTORIES):
            return self._call_on_captured(func, args, kwargs, tensors)
        if any(is_known):
            args, kwargs = pytree.tree_map_only(Tensor, self._replace_known, (args, kwargs))
        return self._call(func, args, kwargs)

    def _note_read(self, func: Any, args: tuple[Any, ...]) -> None:
        """Records that a user's function reads a tensor's property, which may differ in later calls.

        Reads in library functions are not recorded, because these functions are correct for any value.
        """
        name = READ_ONCE[func]
        if name == "requires_grad" and self._captures.is_captured(args[0]):
            return  # later calls compare `requires_grad` of captured tensors anyway
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _INTERMEDIATE_MODULES:
            frame = frame.f_back
        if frame is not None and not is_library(frame.f_globals.get("__name__")):
            self._note(f"Tensor.{name}", SourceLocation.of(frame))

    def finish(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replaces computed values among the results of the core. Call this method at the end of a run."""
        if self._hoists is not Hoists.NOTHING:
            for tensor in results:
                self._find(tensor)
            return tuple(self._drop_history(self._replace_known(t)) for t in results)
        return tuple(results)

    def _call_on_captured(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        refs = pytree.tree_map_only(Tensor, self._make_ref, (args, kwargs))
        autocast = autocast_now()
        key = (func, repr(refs), self._captures.identities(refs), autocast, torch.is_grad_enabled())
        decided = self._captures.decided
        if key not in decided:
            if not self._mode.may_add:
                return self._call(func, args, kwargs)
            own_storages = {storage_of(t) for t in tensors if not self._captures.is_captured(t)}
            try:
                with self._mode.on_trial(own_storages) as ops:
                    result = self._call(func, args, kwargs)
            except UnexpectedWriteError:
                return self._write(func, args, kwargs, tensors, refs, key)
            if not ops:  # the call computes nothing
                argument_ids = {id(t) for t in tensors}
                created = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and id(t) not in argument_ids]
                self._captures.note_passing([t for t in created if self._captures.is_captured(t)])
                return result
            decided[key] = self._decide_call(func, refs, ops, result, own_storages)
        call = decided[key]
        if call.writes:
            return self._write(func, args, kwargs, tensors, refs, key)
        in_step = call.stays or self._is_complete or (call.is_view and self._keep_views)
        roots = self._find_roots(tensors)
        with self._mode.apart(recorded=in_step and self._is_recorded(roots)):
            result = self._call(func, args, kwargs)
        leaves, structure = pytree.tree_flatten(result)
        for i, number in enumerate(call.results):
            if number is not None:
                if in_step:
                    self._mode.defer(leaves[i], roots)
                else:
                    if call.is_view:
                        self._mode.tie([leaves[i], *(t for t in tensors if not self._captures.is_captured(t))])
                    leaves[i] = self._create_variable(number, leaves[i])
                    if call.is_view:
                        self._mode.tie([leaves[i]])
                self._record_value(number, leaves[i], replaced=call.is_view and not call.stays)
        return pytree.tree_unflatten(leaves, structure)

    def _decide_call(
        self, func: Callable[..., Any], refs: Any, ops: Sequence[CalledOp], result: Any, own_storages: set[int]
    ) -> RecordedCall:
        """Creates the record of a call that occurs for the first time, and decides if the call stays in the step."""
        leaves = pytree.tree_leaves(result)
        new = [t for t in leaves if isinstance(t, Tensor) and not self._captures.is_captured(t)]
        has_gradient = any(t.requires_grad for t in new)
        return RecordedCall(
            getattr(func, "__name__", str(func)),
            tuple(self._mode.add_value(t) if any(t is n for n in new) else None for t in leaves),
            _list_numbers(refs),
            stays=all(stays(called, self._hoists, has_gradient=has_gradient) for called in ops),
            is_view=any(storage_of(t) in own_storages for t in new),
            location=user_location(),
        )

    def _write(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        refs: Any,
        key: Hashable,
    ) -> Any:
        """Runs a call that writes to a value computed from captured tensors alone. All views of the value change."""
        records = [record for record in self._known_values.values() if self._is_same(record)]
        roots = self._find_roots(tensors)
        with self._mode.apart(recorded=self._is_recorded(roots)) as ops:
            result = self._call(func, args, kwargs)
        written_storages = {storage for called in ops for storage in called.writes}
        decided = self._captures.decided
        if key not in decided:
            # A step cannot write to a view of a value that is computed before the loop.
            can_stay = all(stays(called, self._hoists, has_gradient=True) for called in ops) and all(
                self._captures.stays(record.number)
                for record in records
                if record.storage in written_storages and any(record.tensor is t for t in tensors)
            )
            name, location = getattr(func, "__name__", str(func)), user_location()
            decided[key] = RecordedCall(
                name, (), _list_numbers(refs), can_stay, writes=True, is_plain=False, location=location
            )
        call = decided[key]
        for record in records:
            if record.storage not in written_storages:
                continue
            self._mode.defer(record.tensor, roots)
            new_key = ("written", key, record.number)
            if new_key not in decided:
                if not self._mode.may_add:
                    continue
                number = self._mode.add_value(record.tensor)
                can_stay = call.stays and self._captures.stays(record.number)
                reads = call.reads | {record.number}
                decided[new_key] = RecordedCall(
                    call.name, (number,), reads, stays=can_stay, is_view=True, location=call.location
                )
            (written_number,) = decided[new_key].results
            assert written_number is not None
            self._record_value(written_number, record.tensor, replaced=not decided[new_key].stays)
        return result

    # -- known values ------------------------------------------------------------------------------------

    def _record_value(self, number: int, tensor: Tensor, *, replaced: bool) -> None:
        with self._mode.on_trial():
            self._known_values[id(tensor)] = _KnownValue.of(number, tensor, replaced=replaced)
        lifted = self._captures.lifted
        if self._is_complete and lifted is not None and number in lifted and number not in self.computed:
            self.computed[number] = tensor.clone()  # a copy, because later ops may write to the tensor

    def _find(self, tensor: Tensor) -> _KnownValue | None:
        """Finds the record of a tensor that was computed from captured tensors alone."""
        record = self._known_values.get(id(tensor))
        if record is not None and self._is_same(record):
            return record
        if self._arguments is None or self._captures.is_captured(tensor):
            return None
        number = record.number if record is not None and record.holds() else self._find_alias_number(tensor)
        return None if number is None else self._record_history(number, tensor)

    def _is_same(self, record: _KnownValue) -> bool:
        with self._mode.on_trial():  # torch creates a new history for a view after a write to the view's memory
            return record.is_same()

    def _find_alias_number(self, tensor: Tensor) -> int | None:
        """The number of a value that has the memory and the layout of `tensor`, or `None`.

        Such a value exists if a custom function has returned one of its arguments, and `tensor` is this result.
        """
        storage = storage_of(tensor)
        place = _describe_layout(tensor)
        for record in self._known_values.values():
            if record.storage == storage and record.holds() and _describe_layout(record.tensor) == place:
                return record.number
        number = self._captures.number_of(storage)
        return number if number is not None and _describe_layout(self._captures.stand_ins[number]) == place else None

    def _record_history(self, old_number: int, tensor: Tensor) -> _KnownValue | None:
        """Records a tensor to which a custom `autograd.Function` has assigned another history, but no other value."""
        with self._mode.on_trial():
            node = tensor.grad_fn
        if (node is None and tensor.requires_grad) or not self._is_fixed(node):
            return None
        ordinal = self._nodes.setdefault(node, len(self._nodes))
        key = ("history", old_number, node is not None and ordinal, tensor.output_nr)
        decided = self._captures.decided
        if key not in decided:
            if not self._mode.may_add:
                return None
            number = self._mode.add_value(tensor)
            can_stay = self._captures.stays(old_number) and self._hoists is not Hoists.EVERYTHING
            name = "autograd.Function" if node is None else str(node.name())
            location = user_location()
            decided[key] = RecordedCall(
                name, (number,), {old_number}, can_stay, is_view=True, is_plain=False, location=location
            )
        (new_number,) = decided[key].results
        assert new_number is not None
        self._mode.defer(tensor, self._mode.sources_of(tensor))
        self._record_value(new_number, tensor, replaced=not decided[key].stays)
        return self._known_values[id(tensor)]

    def _is_fixed(self, node: Any) -> bool:
        """True if a gradient that flows on from this node reaches only captured tensors and variables."""
        assert self._arguments is not None
        arguments = {id(t) for t in self._arguments}
        ends = {t.grad_fn for t in self._captures.tensors.values() if t.grad_fn is not None}
        reached = (reached_node for reached_node, _ in reachable_nodes([node], stop=ends) if reached_node not in ends)
        return all(id(getattr(reached_node, "variable", None)) not in arguments for reached_node in reached)

    def _make_ref(self, tensor: Tensor) -> Ref:
        record = self._known_values.get(id(tensor))
        if record is not None:
            return Ref(record.number, tensor.requires_grad)
        return Ref(self._mode.number_of(tensor, user_location()), tensor.requires_grad)

    def _find_roots(self, tensors: Sequence[Tensor]) -> set[int]:
        """Numbers of the captured values from which these tensors were computed."""
        return set[int]().union(*(self._mode.sources_of(t) for t in tensors))

    def _is_recorded(self, numbers: set[int]) -> bool:
        """True if ops on these values are recorded in this run.

        An incomplete run after discovery records only ops on lifted values, for which the step has arguments. All other
        values are used only before the loop.
        """
        return self._is_complete or self._captures.lifted is None or numbers <= set(self._captures.lifted)

    # -- captured tensors with a history -----------------------------------------------------------------

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a torch function so that its result does not include the autograd history of captured tensors.

        Otherwise, if a captured tensor `b` was computed from a captured tensor `a`, the gradient of `a` would be
        counted twice. The gradient continues through the history outside of the core.
        """
        if func in _PROPERTY_GETTERS:
            return func(*args, **kwargs)
        with_history = {
            id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self._has_history(t)
        }
        if not with_history:
            return func(*args, **kwargs)
        leaves = {key: self._drop_history(t) for key, t in with_history.items()}
        of_leaf = {id(leaf): with_history[key] for key, leaf in leaves.items()}
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: leaves.get(id(t), t), (args, kwargs))
        return pytree.tree_map_only(Tensor, lambda t: of_leaf.get(id(t), t), func(*args, **kwargs))

    def _has_history(self, tensor: Tensor) -> bool:
        return self._captures.is_captured(tensor) and tensor.requires_grad and not tensor.is_leaf

    def _drop_history(self, tensor: Tensor) -> Tensor:
        """Replaces a captured tensor that has an autograd history with a leaf, at which the gradient ends."""
        if not self._has_history(tensor):
            return tensor
        return self._get_leaf(self._mode.number_of(tensor, user_location()), requires_grad=True)

    # -- stand-ins for values that are computed before the loop ------------------------------------------

    def _replace_known(self, tensor: Tensor) -> Tensor:
        record = self._known_values.get(id(tensor))
        if self._is_complete or record is None or not record.replaced or not self._is_same(record):
            return tensor
        variable = self._create_variable(record.number, tensor)
        self._mode.freeze(variable)  # a write to the variable would not change the views of the value
        return variable

    def _get_leaf(self, number: int, requires_grad: bool) -> Tensor:
        if number in self.variables:
            return self.variables[number]
        with self._mode.apart(recorded=self._is_recorded({number})):
            leaf = self._captures.stand_ins[number].detach()
        if requires_grad:
            self.variables[number] = leaf.requires_grad_()
        return leaf

    def _create_variable(self, number: int, like: Tensor) -> Tensor:
        """Creates a variable for a value that is computed before the loop.

        Each call returns a separate copy, because the core may write to the copy.
        """
        leaf = self._get_leaf(number, like.requires_grad)
        with self._mode.apart(recorded=self._is_recorded({number})):
            variable = leaf.clone()
        self._mode.defer(variable, {number})
        return variable


# Modules on the stack between the read of a property and this mode.
_INTERMEDIATE_MODULES = ("torch._tensor", "torch.overrides")
# Properties that describe a tensor and compute nothing.
_PROPERTIES = """
    data dtype device grad grad_fn is_leaf ndim output_nr requires_grad shape _base _version
"""
_PROPERTY_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in _PROPERTIES.split())
_FACTORIES = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros}
)


def _is_own(frame: FrameType) -> bool:
    """True if `frame` runs code of this package, which itself reads tensors while the core runs."""
    return str(frame.f_globals.get("__name__")).startswith("flexsn_graph.")


def _list_numbers(refs: Any) -> set[int]:
    return {a.value for a in pytree.tree_leaves(refs) if isinstance(a, Ref)}


def _describe_layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
