"""Finds captured parameters that belong to no module and no optimizer. Training does not update such parameters."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from flexsn_hop.callers import warn

# Maximum number of entries that are searched in a container. Later entries are assumed to be data.
_MOST_ENTRIES = 1000


def warn_of_unregistered(core: object) -> None:
    """Warns of captured parameters that belong to no module and no optimizer.

    Such parameters receive gradients, but `module.parameters()` does not contain them. Without the warning, training
    would silently leave them unchanged.
    """
    names = unregistered(core)
    if names:
        warn(
            f"the core captures parameters that are in no module and no optimizer: {', '.join(names)}. They get "
            "gradients, but no optimizer updates them. Make the core an nn.Module that owns them, register them "
            "(neuron.register_parameter), or give them to the optimizer."
        )


def unregistered(core: object) -> list[str]:
    """Returns the names under which `core` captures unregistered parameters."""
    captured = {id(value): name for name, value in _walk_captured(core, set()) if isinstance(value, nn.Parameter)}
    if not captured:
        return []
    registered_ids = {id(parameter) for parameter in _collect_registered()}
    return [name for number, name in captured.items() if number not in registered_ids]


def captured_by(core: object) -> Iterator[tuple[str, Any]]:
    """Yields `(name, value)` for each object that a core reads, except its arguments. Does not search modules."""
    return _walk_captured(core, set())


def _walk_captured(value: object, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields `(name, value)` for each object that a callable reads, except its arguments. Searches recursively.

    Does not search modules, because their parameters are registered.
    """
    if id(value) in visited:
        return
    visited.add(id(value))
    for name, item in _list_parts(value):
        yield from _walk(name, item, visited)


def _walk(name: str, item: object, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields an item. Also yields its parts if it is a callable, or its entries if it is a container."""
    yield name, item
    if not isinstance(item, list | tuple | dict):
        yield from _walk_captured(item, visited)
    elif id(item) not in visited:
        visited.add(id(item))
        entries = item.items() if isinstance(item, dict) else enumerate(item)
        for key, entry in islice(entries, _MOST_ENTRIES):
            yield from _walk(f"{name}[{key!r}]", entry, visited)


def _list_parts(value: object) -> list[tuple[str, Any]]:
    """Returns the parts of a callable, by name. PyTorch's own callables, modules and classes have no parts."""
    kind = value if isinstance(value, types.FunctionType) else type(value)
    if (kind.__module__ or "").startswith("torch") or isinstance(value, nn.Module | type):
        return []
    if isinstance(value, types.MethodType):
        return [("function", value.__func__), *_list_attributes(value.__self__)]
    if isinstance(value, partial):
        arguments = [(f"argument {i}", v) for i, v in enumerate(value.args)]
        return [("function", value.func), *arguments, *value.keywords.items()]
    if isinstance(value, types.FunctionType):
        return list(_list_variables(value).items())
    return [("function", type(value).__call__), *_list_attributes(value)] if callable(value) else []


def _list_attributes(value: object) -> list[tuple[str, Any]]:
    return [] if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).items())


def _list_variables(function: types.FunctionType) -> dict[str, Any]:
    """Returns the global variables, closure variables and defaults of a function, by name."""
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return {}
    defaults = {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
    return {**variables.globals, **variables.nonlocals, **defaults, **(function.__kwdefaults__ or {})}


def _collect_registered() -> Iterator[nn.Parameter]:
    # Checks `type` instead of calling isinstance, which would read `__class__` of lazy and deprecated objects.
    for owner in gc.get_objects():
        if issubclass(type(owner), nn.Module):
            yield from owner.__dict__.get("_parameters", {}).values()
        elif issubclass(type(owner), torch.optim.Optimizer):
            for group in owner.param_groups:
                yield from group["params"]
