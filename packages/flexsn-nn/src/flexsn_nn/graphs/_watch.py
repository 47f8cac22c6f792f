"""Detects changes of a network, its loss and its optimizer. Each call first compares objects by identity."""

from __future__ import annotations

import argparse
import dis
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sized
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._handover import Handover
from flexsn_nn._ranges import Ranges
from flexsn_nn._replaced_forwards import ReplacedForward
from flexsn_nn._spike_bits import SpikeBits
from flexsn_nn._stateful import Stateful
from flexsn_nn.exact._exchange import SpikeExchange
from flexsn_nn.exact._layer import ExactForward
from flexsn_nn.graphs._unchanged import SameObjects, SameTensors, is_plain

# Attributes with results and caches of calls. Such attributes do not influence a call.
_RESULTS: dict[type, frozenset[str]] = {
    FlexSN: frozenset(
        (
            "states",
            "state_seqs",
            "spike_counts",
            "_repeats",
            "_again",
            "_firing",
            "_looks_for_sharing",
            "_numbers",
            "_graph",
            "_reset_in",
            "_ready_made",
            "_shapes_for",
            "_decisions",
            "_refusals",
            "_programs",
            "_undelayed",
        )
    ),
    Stateful: frozenset(("_states", "_reset_in", "_set_in_export", "_numbers")),
    SpikeBits: frozenset(("_written", "_refused")),
    Handover: frozenset(("_pair",)),
    Ranges: frozenset(("_stamps", "_changes", "_pending", "_warned")),
    ReplacedForward: frozenset(("last",)),
    ExactForward: frozenset(("_record", "_grid", "_kind", "_reason", "_scale")),
    SpikeExchange: frozenset(("_programs", "_rejected_core", "_zero")),
}
# Packages whose objects and functions are compared only by identity.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "triton", "pytest", "flexsn_graph", "flexsn_codegen"}
_FOREIGN |= {"flexsn_runtime", "flexsn_hop"}
# Classes of the standard library that hold a user's values.
_PLAIN_OBJECTS = (argparse.Namespace, types.SimpleNamespace)
# Packages of objects that observe a step and are not part of it.
_OBSERVERS = ("flexsn_nn.graphs", "flexsn_nn.monitor")
_BY_VALUE = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAX_VALUES = 20_000
# For containers with more items, such as a data set or a vocabulary, only the length is compared.
_MAX_LENGTH = 10_000

Properties = tuple[Any, ...]


class WatchedAttributes(NamedTuple):
    """A root object of which only some attributes are watched."""

    owner: object
    names: tuple[str, ...]


class StepWatch:
    """All values that are reachable from some roots: attributes, parameters, containers and closure variables.

    Numbers and strings are compared by value, and tensors by memory, layout, dtype, `requires_grad` and the presence of
    hooks. All other objects are compared by identity. Tensors that are not on the network's device are also compared by
    version, because their values are fixed in a graph.

    Args:
        roots: objects by their names in messages.
        device: device of the network.
        ignoring: names of values that may change.

    Attributes:
        too_many: True if there are more values than each call can compare. The remaining values are not watched.
    """

    def __init__(self, roots: Mapping[str, object], device: torch.device, ignoring: Iterable[str] = ()) -> None:
        self._device = device.type
        self.too_many = False
        self._ignoring = frozenset(ignoring)
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that addresses stay unique
        self._empty: list[Any] = []
        self._empty_names: list[str] = []
        self._places: list[_WatchedPlace] = []
        self._tensors: list[Tensor] = []
        self._tensor_names: list[str] = []
        unvisited: list[tuple[str, object]] = [*roots.items()][::-1]
        while unvisited:
            name, value = unvisited.pop()
            unvisited += reversed(self._visit(name, value))
        self._properties = self._read_properties(self._tensors)
        # Each call first compares all objects by identity, at once. If an object has changed, the places are compared
        # one by one, and equal numbers count as equal.
        self._same_tensors = SameTensors(tensor for tensor in self._tensors if is_plain(tensor, self._device))
        self._others = [tensor for tensor in self._tensors if not is_plain(tensor, self._device)]
        self._properties_of_others = self._read_properties(self._others)
        self._same_objects = SameObjects()
        self._same_objects.sized += self._empty
        for place in self._places:
            place.add_to(self._same_objects)
        self._same_objects.remember()

    def _read_properties(self, tensors: Iterable[Tensor]) -> list[Properties]:
        return [_get_properties(tensor, self._device) for tensor in tensors]

    def holds(self) -> bool:
        """True if no watched value has changed."""
        if not self._same_objects.same():
            if any(map(len, self._empty)) or not all(place.holds() for place in self._places):
                return False
            self._same_objects.remember()
        return self._same_tensors.same() and self._properties_of_others == self._read_properties(self._others)

    def changes(self) -> list[str]:
        """Returns the names of the values that have changed."""
        names = [name for name, container in zip(self._empty_names, self._empty, strict=True) if container]
        for place in self._places:
            if not place.holds():
                names += place.changes()
        current = zip(self._tensor_names, self._read_properties(self._tensors), self._properties, strict=True)
        return names + [name for name, properties, stored in current if properties != stored]

    def _visit(self, name: str, value: object) -> list[tuple[str, object]]:
        """Watches a value, and returns the values that it contains, to be visited next."""
        if value is None or isinstance(value, _BY_VALUE) or id(value) in self._seen or name in self._ignoring:
            return []
        self._seen[id(value)] = value
        if len(self._seen) > _MAX_VALUES:
            self.too_many = True
            return []
        if isinstance(value, Tensor):
            self._tensors.append(value)
            self._tensor_names.append(name)
            return []
        if isinstance(value, WatchedAttributes):
            attributes = vars(value.owner)
            return self._watch_keys(
                lambda key: f"{name}.{key}", attributes, [key for key in value.names if key in attributes]
            )
        if isinstance(value, dict | list | tuple | set | frozenset) and len(value) > _MAX_LENGTH:
            self._places.append(_LengthPlace(name, value))
            return []
        if isinstance(value, dict):
            return self._watch_dict(name, value, lambda key: f"{name}[{key!r}]" if _is_plain(key) else f"{name}[…]")
        if isinstance(value, list):
            return self._watch_list(name, value)
        if isinstance(value, tuple | set | frozenset):
            return [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, functools.partial):
            return [(f"{name}.func", value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
        if isinstance(value, types.MethodType):
            return [(name, value.__self__), (name, value.__func__)]
        if isinstance(value, types.FunctionType):
            return self._watch_function(name, value)
        return self._watch_object(name, value)

    def _watch_object(self, name: str, value: object) -> list[tuple[str, object]]:
        kind = type(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, type | types.ModuleType) or not isinstance(attributes, dict):
            return []
        is_module = isinstance(value, nn.Module)
        if kind.__module__.startswith(_OBSERVERS):
            return []
        if not is_module and _is_foreign(kind) and not isinstance(value, _PLAIN_OBJECTS):
            return []
        results: frozenset[str] = frozenset().union(*(_RESULTS.get(base, ()) for base in kind.__mro__))
        values = self._watch_dict(name, attributes, lambda key: _name_attribute(name, key), results)
        for base in kind.__mro__:
            if not _is_foreign(base) and not base.__module__.startswith("flexsn_nn."):
                values += self._watch_class(base)
        return values

    def _watch_class(self, kind: type) -> list[tuple[str, object]]:
        """Watches methods and values of a user's class."""
        if id(kind) in self._seen:
            return []
        self._seen[id(kind)] = kind
        kinds = (types.FunctionType, Tensor, list, dict, *_BY_VALUE)
        attributes: Any = vars(kind)
        keys = [key for key, value in attributes.items() if not _is_special(key) and isinstance(value, kinds)]
        return self._watch_keys(lambda key: f"{kind.__name__}.{key}", attributes, keys)

    def _watch_dict(
        self,
        name: str,
        container: dict[Any, Any],
        describe: Callable[[Any], str],
        excluded: frozenset[str] = frozenset(),
    ) -> list[tuple[str, object]]:
        if not container:
            self._empty.append(container)
            self._empty_names.append(name)
            return []
        ignored = {key for key in container if describe(key) in self._ignoring}
        self._places.append(_WatchedPlace(name, container, describe, excluded | ignored))
        return [
            (describe(key), value) for key, value in container.items() if key not in excluded and key not in ignored
        ]

    def _watch_list(self, name: str, container: list[Any]) -> list[tuple[str, object]]:
        if not container:
            self._empty.append(container)
            self._empty_names.append(name)
            return []
        self._places.append(_ListPlace(name, container))
        return [(f"{name}[{i}]", item) for i, item in enumerate(container)]

    def _watch_keys(
        self, describe: Callable[[str], str], container: dict[str, Any], keys: list[str]
    ) -> list[tuple[str, object]]:
        """Watches the values of some keys of a dict. Other keys may be added and removed."""
        if not keys:
            return []
        self._places.append(_KeysPlace(describe, container, keys))
        return [(describe(key), container[key]) for key in keys]

    def _watch_function(self, name: str, function: types.FunctionType) -> list[tuple[str, object]]:
        if _is_foreign(function) or function.__module__.startswith("flexsn_nn."):
            return []
        values: list[tuple[str, object]] = []
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._places.append(_CellPlace(variable, cell))
            values.append((variable, _read_cell(cell)))
        variables = function.__globals__
        names = [variable for variable in _list_global_names(function.__code__) if variable in variables]
        values += self._watch_keys(lambda variable: variable, variables, names)
        return [*values, (f"{name}.__defaults__", function.__defaults__)]


class _WatchedPlace:
    """Values of a dict, except the values of some keys."""

    def __init__(
        self, name: str, container: dict[Any, Any], describe: Callable[[Any], str], excluded: frozenset[str] | set[Any]
    ) -> None:
        self._name = name
        self._container = container
        self._describe = describe
        self._excluded = excluded
        self._keys = tuple(key for key in container if key not in excluded)
        self._values = [container[key] for key in self._keys]
        self._size = len(container)

    def add_to(self, same: SameObjects) -> None:
        """Adds the values of this place to `same`, which compares them."""
        same.sized.append(self._container)
        if self._excluded:
            same.parts.append((self._container.get, self._keys))
        else:
            same.mappings.append(self._container)

    def holds(self) -> bool:
        """True if no value has changed."""
        container = self._container
        if not self._excluded:
            is_same = len(container) == len(self._values) and all(map(is_, container.values(), self._values))
        else:
            is_same = len(container) == self._size and all(map(is_, map(container.get, self._keys), self._values))
        if is_same:
            return True
        changes = self.changes()
        self._size = len(container)
        return not changes

    def changes(self) -> list[str]:
        """Returns the names of the values that have changed. Replaces stored objects by equal current objects."""
        container = self._container
        keys = tuple(key for key in container if key not in self._excluded)
        if keys != self._keys:
            return [self._describe(key) for key in {*keys} ^ {*self._keys}] or [self._name]
        changes = []
        for i, key in enumerate(keys):
            if _is_alike(container[key], self._values[i]):
                self._values[i] = container[key]
            else:
                changes.append(self._describe(key))
        return changes


class _ListPlace(_WatchedPlace):
    """Items of a list."""

    def __init__(self, name: str, container: list[Any]) -> None:
        self._name = name
        self._items = container
        self._values = list(container)

    def add_to(self, same: SameObjects) -> None:
        same.sized.append(self._items)
        same.sequences.append(self._items)

    def holds(self) -> bool:
        if len(self._items) == len(self._values) and all(map(is_, self._items, self._values)):
            return True
        return not self.changes()

    def changes(self) -> list[str]:
        if len(self._items) != len(self._values):
            return [self._name]
        pairs = enumerate(zip(self._items, self._values, strict=True))
        changes = [f"{self._name}[{i}]" for i, (current, stored) in pairs if not _is_alike(current, stored)]
        if not changes:
            self._values = list(self._items)
        return changes


class _LengthPlace(_WatchedPlace):
    """Length of a container."""

    def __init__(self, name: str, container: Sized) -> None:
        self._name = name
        self._items = container
        self._size = len(container)

    def add_to(self, same: SameObjects) -> None:
        same.sized.append(self._items)

    def holds(self) -> bool:
        return len(self._items) == self._size

    def changes(self) -> list[str]:
        return [] if self.holds() else [self._name]


class _CellPlace(_WatchedPlace):
    """Closure variable of a function."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        self._name = name
        self._cell = cell
        self._value = _read_cell(cell)

    def add_to(self, same: SameObjects) -> None:
        same.cells.append(self._cell)

    def holds(self) -> bool:
        return _is_alike(_read_cell(self._cell), self._value)

    def changes(self) -> list[str]:
        return [] if self.holds() else [self._name]


class _KeysPlace(_WatchedPlace):
    """Values of some keys of a dict."""

    def __init__(self, describe: Callable[[str], str], container: dict[str, Any], keys: list[str]) -> None:
        self._describe = describe
        self._container = container
        self._watched_keys = keys
        self._values = [container[key] for key in keys]

    def add_to(self, same: SameObjects) -> None:
        same.parts.append((self._container.get, self._watched_keys))

    def holds(self) -> bool:
        if all(map(is_, map(self._container.get, self._watched_keys), self._values)):
            return True
        return not self.changes()

    def changes(self) -> list[str]:
        pairs = zip(self._watched_keys, self._values, strict=True)
        return [self._describe(key) for key, value in pairs if not _is_alike(self._container.get(key), value)]


def _get_properties(tensor: Tensor, device: str) -> Properties:
    """Returns the properties by which a tensor is compared."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass or a fake tensor without memory
        address = id(tensor)
    version = -1 if tensor.device.type == device else tensor._version
    return (
        address,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        version,
        not tensor._backward_hooks,
    )


def _is_alike(current: object, stored: object) -> bool:
    if current is stored:
        return True
    if type(current) is not type(stored):
        return False
    if isinstance(current, _BY_VALUE):
        return current == stored
    if isinstance(current, tuple) and isinstance(stored, tuple):
        return len(current) == len(stored) and all(map(_is_alike, current, stored))
    if isinstance(current, types.MethodType) and isinstance(stored, types.MethodType):
        return current.__func__ is stored.__func__ and current.__self__ is stored.__self__
    return False


def _read_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


@functools.lru_cache(1024)
def _list_global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of global variables that a function and its nested functions read."""
    loads = (step for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    names = dict.fromkeys(str(step.argval) for step in loads)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_list_global_names(constant))
    return tuple(names)


def _is_foreign(definition: Any) -> bool:
    """True for classes and functions of libraries, whose values are not watched."""
    module = getattr(definition, "__module__", None) or ""
    return module.partition(".")[0] in _FOREIGN and module != "__main__"


def _is_plain(key: object) -> bool:
    return isinstance(key, str | int)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name != "__call__"


def _name_attribute(name: str, key: Any) -> str:
    return f"{name}.{key}"


def readable(name: str) -> str:
    """Shortens a name to the form `net.layer.tau`, without the dictionaries of modules."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)
