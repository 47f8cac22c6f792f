"""Detects, before a core runs, whether its code draws random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from flexsn_nn._torch_private import constant
from flexsn_nn.transforms._transform import Transform

_NAMES = frozenset({"bernoulli_like", "normal_like", "uniform_like"})
_LIBRARIES = ("torch", "numpy", "flexsn_")
_MOST = 1_000


def draws(core: Callable[..., Any]) -> bool:
    """True if the code of a core, or code that it refers to by name, uses functions of `flexsn_nn.random`.

    Draws in code that is reached in other ways, or only after `_MOST` other objects, are detected when they run.
    """
    if isinstance(core, MethodType) and all(map(_is_ready_made, type(core.__self__).__mro__)):
        bound = core.__self__
        return isinstance(bound, nn.Module) and any(getattr(child, "_draws", False) for child in bound.modules())
    pending: list[tuple[Any, type | None]] = [(core, None)]
    visited: set[int] = set()
    while pending and len(visited) < _MOST:
        value, owner = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, nn.Module) and getattr(value, "_draws", False) is True:
            return True  # a neuron whose step is called by another neuron
        if isinstance(value, FunctionType):
            if _is_draw(value):
                return True
            if owner is None and (value.__module__ or "").startswith(_LIBRARIES):
                continue
            names = set(_list_names(value.__code__))
            if names & _NAMES:
                return True
            pending += [(used_value, owner) for used_value in _resolve(value, names, owner)]
        else:
            pending += _list_parts(value)
    return False


_BY_KIND: WeakKeyDictionary[type[Transform], bool] = WeakKeyDictionary()


@constant
def step_draws(kind: type[Transform]) -> bool:
    """True if the method `step` of a class of transforms draws random numbers; see `draws`."""
    is_drawing = _BY_KIND.get(kind)
    if is_drawing is None:
        is_drawing = _BY_KIND[kind] = draws(kind.step)
    return is_drawing


def _is_draw(function: FunctionType) -> bool:
    return function.__name__ in _NAMES and function.__module__ == "flexsn_nn.random"


def _list_names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that a function, or a function defined inside of it, uses."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_names(inner)


def _resolve(function: FunctionType, names: set[str], owner: type | None) -> Iterator[Any]:
    """Yields the globals, methods and closure variables that a function uses.

    Args:
        names: names that the function's code uses.
        owner: class whose methods the code may call by name; `None` if the function was not reached through a method.
    """
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name]
        method = None if owner is None else getattr(owner, name, None)
        if isinstance(method, FunctionType):
            yield method
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue


def _list_parts(value: Any) -> list[tuple[Any, type | None]]:
    """Returns the callables that an object may call, each with the class of which it is a method, or with `None`."""
    if isinstance(value, MethodType):
        return [(value.__func__, type(value.__self__)), *_list_children(value.__self__)]
    if isinstance(value, partial):
        return [(part, None) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, type | ModuleType) or not callable(value):
        return []
    kind = type(value)
    entry: Any = getattr(kind, "forward", None) if isinstance(value, nn.Module) else kind.__dict__.get("__call__")
    entries = [] if not isinstance(entry, FunctionType) or _is_torch(kind) else [(entry, kind)]
    attributes = [] if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).values())
    return [*entries, *((part, None) for part in attributes if callable(part)), *_list_children(value)]


def _is_ready_made(kind: type) -> bool:
    """True for `object` and for classes of this package and of torch, whose own methods do not draw numbers."""
    return kind is object or kind.__module__.startswith(("flexsn_nn.", "torch."))


def _is_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _list_children(value: Any) -> list[tuple[Any, type | None]]:
    return [(child, None) for child in value.children()] if isinstance(value, nn.Module) else []
