"""For the places that one core has read, finds the counterparts in another core with the same code.

Two cores are twins if every value that the first core read during its trace has a counterpart in the other core: code,
numbers, modules and classes are equal, tensors have the same properties, and each object that belongs to the first core
corresponds to exactly one object of the other core. The trace of a core is also valid for its twins, which do not have
to run.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import weakref
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial, partialmethod
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._torch_private_modules import hooks_of_all_modules
from flexsn_graph.reads._library import is_internal
from flexsn_graph.reads._places import NotTwinsError, Place, base_of
from flexsn_graph.reads._values import MISSING, SCALARS, is_atom, is_numpy, is_python_class, same

_CACHED = type(lru_cache(lambda: None))


class Twins:
    """Objects of a traced core, and their counterparts in another core.

    Args:
        core: the traced core.
        other: the other core.

    Raises:
        NotTwinsError: the cores are not twins.
    """

    def __init__(self, core: Any, other: Any) -> None:
        # The key is the id of the original. Both objects are kept alive, so that no other objects get their ids in the
        # meantime.
        self._counterparts: dict[int, tuple[Any, Any]] = {}
        self._originals: dict[int, int] = {}
        for hooks in hooks_of_all_modules().values():
            self._register(hooks, hooks)
        for common in (builtins.__dict__, sys.modules, vars(os.environ)["_data"]):
            self._register(common, common)
        self.pair(core, other)

    def counterpart(self, value: Any) -> Any:
        """The other core's object that corresponds to `value`.

        Raises:
            NotTwinsError: no place that was read leads to `value`.
        """
        if is_atom(value) or isinstance(value, type):
            return value
        pair = self._counterparts.get(id(value))
        if pair is not None:
            return pair[1]
        if isinstance(value, dict):  # global variables
            module = sys.modules.get(value.get("__name__", ""))
            if module is not None and module.__dict__ is value:
                return value
        if isinstance(value, tuple):
            return tuple(map(self.counterpart, value))
        raise NotTwinsError

    def function(self, function: Any) -> Any:
        """The counterpart of a function that a place calls. A library function is its own counterpart."""
        pair = self._counterparts.get(id(function))
        if pair is not None:
            return pair[1]
        if isinstance(function, weakref.ref) or (isinstance(function, FunctionType) and function.__closure__):
            raise NotTwinsError
        return function

    def values(self, values: Mapping[Place, Any]) -> dict[Place, tuple[Place, Any]]:
        """For each place, its counterpart and the counterpart's value.

        Args:
            values: the values that were read, by place.

        Raises:
            NotTwinsError: a place has no counterpart, or the counterpart has another value.
        """
        results: dict[Place, tuple[Place, Any]] = {}
        waiting = dict(values)
        while waiting:
            # A place has a counterpart only after another place has led to the object that contains it.
            postponed: dict[Place, Any] = {}
            for place, before in waiting.items():
                try:
                    other = place.counterpart(self)
                except NotTwinsError:
                    postponed[place] = before
                    continue
                current = other.read()
                if before is MISSING or current is MISSING:
                    self.pair(before, current)
                else:
                    place.pair(self, before, current)
                other.in_backward, other.in_forward = place.in_backward, place.in_forward
                results[place] = other, current
            if len(postponed) == len(waiting):
                raise NotTwinsError
            waiting = postponed
        return {place: results[place] for place in values}

    def pair(self, value: Any, other: Any) -> None:
        """Registers two values as counterparts.

        Raises:
            NotTwinsError: the values differ, or they already have other counterparts.
        """
        if value is MISSING or other is MISSING or _is_plain(value) or _is_plain(other):
            equal_sets = type(value) is type(other) is frozenset and _list_kinds(value) == _list_kinds(other)
            if not equal_sets and not same(other, value):
                raise NotTwinsError
            return
        registered = self._counterparts.get(id(value))
        if registered is not None:
            if registered[1] is not other:
                raise NotTwinsError
            return
        if type(value) is not type(other):
            raise NotTwinsError
        self._register(value, other)
        self._pair_parts(value, other)

    def _register(self, value: Any, other: Any) -> None:
        if self._originals.setdefault(id(other), id(value)) != id(value):
            raise NotTwinsError  # two objects in the first core, but only one in the other core
        self._counterparts[id(value)] = value, other

    def _pair_containers(self, value: Any, other: Any, *names: str) -> None:
        for name in names:
            container, other_container = getattr(value, name, None), getattr(other, name, None)
            if type(container) is not type(other_container):
                raise NotTwinsError
            if container is not None and id(container) not in self._counterparts:
                self._register(container, other_container)

    def _pair_parts(self, value: Any, other: Any) -> None:
        if isinstance(value, Tensor):
            self._pair_tensors(value, other)
        elif isinstance(value, FunctionType):
            self._pair_functions(value, other)
        elif isinstance(value, MethodType):
            self.pair(value.__func__, other.__func__)
            self.pair(value.__self__, other.__self__)
        elif isinstance(value, partial):
            self.pair(value.func, other.func)
            self.pair(value.args, other.args)
            self._pair_containers(value, other, "keywords", "__dict__")
        elif isinstance(value, tuple):
            if len(value) != len(other):
                raise NotTwinsError
            for part, counterpart in zip(tuple.__iter__(value), tuple.__iter__(other), strict=True):
                self.pair(part, counterpart)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            if value.__name__ != other.__name__:
                raise NotTwinsError
            if value is not other:
                self.pair(value.__self__, other.__self__)
        elif isinstance(value, weakref.ref | CellType) or base_of(value) is not None:
            pass  # the contents have their own places
        elif value is other:
            self._pair_common(value)
        elif not _is_followed(value):
            raise NotTwinsError
        if not isinstance(value, FunctionType | MethodType | partial):
            attributes, counterpart = _get_dict(value), _get_dict(other)
            if attributes is not None and counterpart is not None and id(attributes) not in self._counterparts:
                self._register(attributes, counterpart)

    def _pair_common(self, value: Any) -> None:
        """Pairs each function inside an object with itself, because both cores share the object."""
        if isinstance(value, staticmethod | classmethod):
            self.pair(value.__func__, value.__func__)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self.pair(function, function)
        elif isinstance(value, cached_property | partialmethod):
            self.pair(value.func, value.func)
        elif isinstance(value, _CACHED):
            self.pair(value.__wrapped__, value.__wrapped__)
            for cache in gc.get_referents(value):
                if type(cache) is dict and id(cache) not in self._counterparts:
                    self._register(cache, cache)

    def _pair_functions(self, value: FunctionType, other: FunctionType) -> None:
        if value.__code__ is not other.__code__ or value.__globals__ is not other.__globals__:
            raise NotTwinsError
        if id(value.__globals__) not in self._counterparts:
            self._register(value.__globals__, value.__globals__)
        for cell, other_cell in zip(value.__closure__ or (), other.__closure__ or (), strict=True):
            self.pair(cell, other_cell)
        self._pair_containers(value, other, "__dict__", "__kwdefaults__")
        self.pair(value.__defaults__, other.__defaults__)

    def _pair_tensors(self, value: Tensor, other: Tensor) -> None:
        if _describe(value) != _describe(other):
            raise NotTwinsError


def _is_followed(value: Any) -> bool:
    """True if all parts of an object have their own places, so that another object may replace it."""
    if isinstance(value, (*SCALARS, type, frozenset, property, staticmethod, classmethod, cached_property)):
        return False
    kind = type(value)
    if isinstance(value, SimpleNamespace) or is_numpy(value, "ndarray"):
        return True
    return is_python_class(kind) and not is_internal(kind)


def _is_plain(value: Any) -> bool:
    """True if equality of a value implies equality of all its parts."""
    return is_atom(value) or (type(value) in (tuple, frozenset) and all(map(_is_plain, value)))


def _list_kinds(values: frozenset[Any]) -> set[tuple[type, str]]:
    return {(type(value), repr(value)) for value in values}


def _get_dict(value: Any) -> dict[str, Any] | None:
    try:
        result = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return result if isinstance(result, dict) else None


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Properties of a tensor on which a trace may depend, except for its memory."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    kind = tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf, tensor.is_inference()
    return (*kind, tensor.is_neg(), tensor.is_conj(), tensor.shape, strides)
