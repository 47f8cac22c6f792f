"""Sees the calls of a core above autograd: those that read a value, and those on captured tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from flexsn_graph._capture import CaptureMode
from flexsn_graph._location import user_location
from flexsn_graph._prologue import Call, CalledOp, Hoists, Ref, stays
from flexsn_graph._refusals import VALUE_READS, reads_value
from flexsn_graph._torch_private import TorchFunctionMode, autocast_now


class CoreCalls(TorchFunctionMode):
    """Replaces the result of a call on captured tensors alone by a new variable, if no step can do the call.

    A variable of its own for autograd, too: the gradient of the step ends there, and goes on outside, through
    the call that is made before the loop.

    Args:
        mode: the dispatch mode that the core runs under.
        hoists: which calls are replaced.

    Attributes:
        variables: those that have a gradient, by the number of the value that they stand for.
    """

    def __init__(self, mode: CaptureMode, hoists: Hoists) -> None:
        super().__init__()
        self.variables: dict[int, Tensor] = {}
        self._mode = mode
        self._captures = mode.captures
        self._hoists = hoists
        # Id of a computed tensor to its value's number. The tensors are kept, so that their ids are theirs.
        self._known: dict[int, tuple[int, Tensor, int]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in VALUE_READS:
            raise reads_value(f"Tensor.{func.__name__}", user_location())
        if not self._on_captured_alone(args, kwargs):
            return func(*args, **kwargs)
        versions = self._versions(args, kwargs)
        with self._mode.apart() as ops:
            result = func(*args, **kwargs)
        if not ops or self._versions(args, kwargs) != versions:
            return func(*args, **kwargs)  # it computes nothing new
        call = self._decide(func, args, kwargs, ops, result)
        if call is None:
            return func(*args, **kwargs)
        if call.stays:
            roots = self._captures.roots(call.reads())
            with self._mode.apart(recorded=self._is_recorded(roots)):
                result = func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        for i, number in enumerate(call.results):
            if number is not None:
                if call.stays:
                    self._mode.defer(leaves[i], roots)
                else:
                    leaves[i] = self._variable(number, leaves[i].requires_grad)
                self._known[id(leaves[i])] = number, leaves[i], leaves[i]._version
        return pytree.tree_unflatten(leaves, structure)

    def _versions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        # Of what the core computed only: a captured tensor may not be changed, and need not have a version.
        return [a._version for a in pytree.tree_leaves((args, kwargs)) if id(a) in self._known]

    def _is_recorded(self, numbers: set[int]) -> bool:
        """Whether the step has arguments for these values. Others are there for calls before the loop alone."""
        return self._captures.lifted is None or numbers <= set(self._captures.lifted)

    def _on_captured_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._hoists is Hoists.NOTHING:
            return False
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        return bool(tensors) and all(self._captures.is_captured(t) or self._is_known(t) for t in tensors)

    def _is_known(self, tensor: Tensor) -> bool:
        # The version: it may have been changed in place meanwhile, by what depends on an input.
        return id(tensor) in self._known and self._known[id(tensor)][2] == tensor._version

    def _decide(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ops: Sequence[CalledOp],
        result: Any,
    ) -> Call | None:
        """What to do with a call, decided once, when it is met first. `None`: it was not met then."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: Ref(self._number(t)), (args, kwargs))
        autocast = autocast_now()
        key = (func, repr(args), repr(kwargs), autocast)
        decided = self._captures.decided
        if key not in decided and self._mode.may_add:
            leaves = pytree.tree_leaves(result)
            read = [a.value for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Ref)]
            has_gradient = any(self._captures.has_gradient(number) for number in read)
            decided[key] = Call(
                func,
                args,
                kwargs,
                tuple(self._mode.add_value(t) if isinstance(t, Tensor) else None for t in leaves),
                stays=all(stays(called, self._hoists, has_gradient=has_gradient) for called in ops),
                has_gradient=has_gradient,
                autocast=autocast,
                location=user_location(),
            )
        return decided.get(key)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) in self._known:
            return self._known[id(tensor)][0]
        number = self._captures.find(tensor)
        assert number is not None, "the call has just been made with it"
        return number

    def _variable(self, number: int, requires_grad: bool) -> Tensor:
        if requires_grad and number in self.variables:
            return self.variables[number]
        with self._mode.apart(recorded=self._is_recorded({number})):
            variable = self._captures.stand_ins[number].detach()
        if requires_grad:
            self.variables[number] = variable.requires_grad_()
        return variable
