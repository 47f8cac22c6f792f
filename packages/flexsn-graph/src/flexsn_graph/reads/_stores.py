"""Stores: objects that a core can write to. Each store takes snapshots of its values and restores them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, MutableMapping
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from flexsn_graph._torch_private_modules import REGISTRIES
from flexsn_graph.reads._library import is_library_class
from flexsn_graph.reads._places import base_of
from flexsn_graph.reads._values import MISSING, SCALARS, is_numpy, is_python_class

# Attributes of a class that Python or the recorder sets.
_IGNORED_ATTRIBUTES = frozenset({"__getattribute__", "__dict__", "__weakref__", "__doc__"})
_MAX_PARTS = 10_000

Values = dict[Any, Any]


class Store:
    """An object whose values a core can replace. Each value has a key.

    Attributes:
        name: name of the object in messages, such as ``self.history``.
        watched: True if reads of single values are recorded. Such a store shows whether the core reads a value before
            it writes the value.
        lasting: True if the values outlast a trace, unless they contain tensors.
    """

    watched = False
    lasting = False

    def __init__(self, name: str) -> None:
        self.name = name

    def take(self) -> Values:
        """The current values, by key."""
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        """Sets the value of `key`, or removes the key if `value` is `MISSING`."""
        raise NotImplementedError

    def restore(self, before: Values, is_chosen: Callable[[Any, Any], bool]) -> None:
        """Restores the values of `before` that differ from the current values.

        Args:
            is_chosen: a function of a key and its current value that returns True if the value is to be restored.
        """
        current = self.take()
        for key in current.keys() | before.keys():
            value, earlier = current.get(key, MISSING), before.get(key, MISSING)
            if value is not earlier and is_chosen(key, value):
                self.put(key, earlier)

    def find_tensor(self, key: Any, value: Any, is_traced: Callable[[Tensor], bool]) -> Tensor | None:
        """Searches a written value for a tensor that must not outlast the run. Returns `None` if there is none."""
        return find_tensor_in(value, is_traced)

    def name_of(self, key: Any) -> str:
        """Name of the value under `key`, for messages."""
        return f"{self.name}.{key}" if self.name else str(key)


class Attributes(Store):
    """A dictionary of attributes or of variables."""

    def __init__(self, name: str, mapping: MutableMapping[str, Any], *, watched: bool = False) -> None:
        super().__init__(name)
        self._mapping = mapping
        self.watched = watched

    def take(self) -> Values:
        return dict(self._mapping)

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            self._mapping.pop(key, None)
        else:
            self._mapping[key] = value


class Class(Store):
    """Attributes of a class."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls.__qualname__)
        self._cls = cls

    def take(self) -> Values:
        return {key: value for key, value in self._cls.__dict__.items() if key not in _IGNORED_ATTRIBUTES}

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            type.__delattr__(self._cls, key)
        else:
            type.__setattr__(self._cls, key, value)


class Slots(Store):
    """Attributes in `__slots__`."""

    watched = True

    def __init__(self, name: str, owner: Any, slots: dict[str, MemberDescriptorType]) -> None:
        super().__init__(name)
        self._owner, self._slots = owner, slots

    def take(self) -> Values:
        results = {}
        for key, slot in self._slots.items():
            try:
                results[key] = slot.__get__(self._owner)
            except AttributeError:
                continue
        return results

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            self._slots[key].__delete__(self._owner)
        else:
            self._slots[key].__set__(self._owner, value)


class Variable(Store):
    """A closure variable."""

    def __init__(self, name: str, cell: CellType) -> None:
        super().__init__(name)
        self._cell = cell

    def take(self) -> Values:
        try:
            return {"": self._cell.cell_contents}
        except ValueError:
            return {}

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value

    def name_of(self, key: Any) -> str:
        return self.name


class Function(Store):
    """The defaults and the code of a function."""

    def __init__(self, name: str, function: FunctionType) -> None:
        super().__init__(f"the defaults of {name}")
        self._function = function

    def take(self) -> Values:
        return {key: getattr(self._function, key) for key in ("__defaults__", "__kwdefaults__", "__code__")}

    def put(self, key: Any, value: Any) -> None:
        setattr(self._function, key, value)

    def name_of(self, key: Any) -> str:
        return self.name


class Container(Store):
    """Elements of a list, a dictionary, a set or a deque. They are restored together, in their original order."""

    def __init__(self, name: str, container: Any) -> None:
        super().__init__(name)
        self._container = container
        self._base: Any = base_of(container)

    def take(self) -> Values:
        if self._base in (dict, OrderedDict):
            return dict(self._base.items(self._container))
        return dict(enumerate(self._base.__iter__(self._container)))

    def put(self, key: Any, value: Any) -> None:
        raise NotImplementedError  # `restore` writes all elements together

    def restore(self, before: Values, is_chosen: Callable[[Any, Any], bool]) -> None:
        current = self.take()
        is_equal = len(current) == len(before) and all(
            _is_same_key(a, b) and current[a] is before[b] for a, b in zip(current, before, strict=True)
        )
        changed = [
            key for key in current.keys() | before.keys() if current.get(key, MISSING) is not before.get(key, MISSING)
        ]
        if is_equal or not (not changed or any(is_chosen(key, current.get(key, MISSING)) for key in changed)):
            return
        base, container = self._base, self._container
        if base is list:
            list.__setitem__(container, slice(None), list(before.values()))
            return
        base.clear(container)
        if base in (dict, OrderedDict):
            for key, value in before.items():
                base.__setitem__(container, key, value)
        elif base is set:
            set.update(container, before.values())
        else:
            deque.extend(container, before.values())

    def name_of(self, key: Any) -> str:
        return f"{self.name}[{key!r}]" if self._base in (dict, OrderedDict) else self.name


class BufferStore(Store):
    """Contents of a numpy array, a `bytearray` or an `array.array`."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self._value = value

    def take(self) -> Values:
        return {"": self._value.copy() if is_numpy(self._value, "ndarray") else self._value[:]}

    def put(self, key: Any, value: Any) -> None:
        self._value[...] = value

    def restore(self, before: Values, is_chosen: Callable[[Any, Any], bool]) -> None:
        if is_numpy(self._value, "ndarray"):
            if self._value.flags.writeable and self._value.tobytes() != before[""].tobytes():
                self._value[...] = before[""]
        elif self._value[:] != before[""]:
            self._value[:] = before[""]

    def name_of(self, key: Any) -> str:
        return self.name


class Cache(Store):
    """Results that `functools.lru_cache` stores.

    Results that contain tensors are removed. Results that the cache itself has discarded are not restored.
    """

    lasting = True

    def __init__(self, name: str, cache: dict[Any, Any]) -> None:
        super().__init__(name)
        self._cache = cache

    def take(self) -> Values:
        return dict(self._cache)

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            self._cache.pop(key, None)

    def find_tensor(self, key: Any, value: Any, is_traced: Callable[[Tensor], bool]) -> Tensor | None:
        # Any tensor counts, because an object of a C extension in the result may contain a traced tensor.
        return find_tensor_in((key, value), lambda tensor: True)

    def name_of(self, key: Any) -> str:
        return self.name


class Context(Store):
    """The value of a `ContextVar`. A variable that was unset becomes `None`, because Python cannot unset a variable."""

    def __init__(self, name: str, variable: ContextVar[Any]) -> None:
        super().__init__(name)
        self._variable = variable

    def take(self) -> Values:
        value = self._variable.get(MISSING)
        return {} if value is MISSING else {"": value}

    def put(self, key: Any, value: Any) -> None:
        self._variable.set(None if value is MISSING else value)

    def name_of(self, key: Any) -> str:
        return self.name


def stores_of(value: Any, name: str) -> list[tuple[Hashable, Store]]:
    """The stores of an object, each with a key. Equal keys identify one store."""
    results: list[tuple[Hashable, Store]] = []
    kind = type(value)
    attributes = _get_dict(value)
    if attributes is not None and not issubclass(kind, type):
        watched = is_python_class(kind) and not issubclass(kind, FunctionType | ModuleType | Tensor)
        results.append((("attributes", id(attributes)), Attributes(name, attributes, watched=watched)))
        if issubclass(kind, nn.Module):
            results += [
                (("attributes", id(part)), Attributes(name, part, watched=True))
                for part in map(attributes.get, REGISTRIES)
                if isinstance(part, dict)
            ]
            results += [
                (("content", id(part)), Container(f"{name}.{key}", part))
                for key, part in attributes.items()
                if key.endswith(("_hooks", "_kwargs", "_set", "_called")) and base_of(part) is not None
            ]
    if kind is FunctionType:
        results.append((("function", id(value)), Function(name, value)))
    elif kind is CellType:
        results.append((("cell", id(value)), Variable(name, value)))
    elif kind is ContextVar:
        results.append((("context", id(value)), Context(name, value)))
    elif issubclass(kind, type):
        if not is_library_class(value) and is_python_class(value):
            results.append((("class", value), Class(value)))
    elif slots := _find_slots(kind):
        results.append((("slots", id(value)), Slots(name, value, slots)))
    if base_of(value) in (list, dict, OrderedDict, set, deque):
        results.append((("content", id(value)), Container(name, value)))
    elif is_numpy(value, "ndarray") or kind.__name__ in ("bytearray", "array"):
        results.append((("memory", id(value)), BufferStore(name, value)))
    return results


def find_tensor_in(value: Any, predicate: Callable[[Tensor], bool]) -> Tensor | None:
    """A tensor in `value` or in its first `_MAX_PARTS` parts for which `predicate` returns True, or `None`."""
    waiting, visited = [value], set[int]()
    while waiting and len(visited) < _MAX_PARTS:
        part = waiting.pop()
        if isinstance(part, Tensor):
            if predicate(part):
                return part
        elif id(part) not in visited:
            visited.add(id(part))
            waiting += _list_parts(part)
    return None


def _list_parts(value: Any) -> list[Any]:
    kind = type(value)
    if kind in SCALARS or issubclass(kind, type | FunctionType | ModuleType):
        return []
    if issubclass(kind, tuple):
        return list(tuple.__iter__(value))
    if issubclass(kind, frozenset):
        return list(frozenset.__iter__(value))
    base: Any = base_of(value)
    parts: list[Any] = []
    if base in (dict, OrderedDict):
        parts = [*base.keys(value), *base.values(value)]
    elif base in (list, set, deque):
        parts = list(base.__iter__(value))
    elif is_numpy(value, "ndarray"):
        return list(value.flat) if value.dtype.hasobject else []
    elif issubclass(kind, MethodType):
        return [value.__self__]
    elif issubclass(kind, partial):
        return [value.args, value.keywords]
    if is_python_class(kind):
        parts += (_get_dict(value) or {}).values()
        slots = _find_slots(kind)
        parts += Slots("", value, slots).take().values() if slots else ()
    return parts


def _find_slots(kind: type) -> dict[str, MemberDescriptorType]:
    return {
        key: entry
        for base in reversed(kind.__mro__)
        if is_python_class(base)
        for key, entry in base.__dict__.items()
        if isinstance(entry, MemberDescriptorType)
    }


def _is_same_key(current: Any, before: Any) -> bool:
    return current is before or (type(current) is int and current == before)


def _get_dict(value: Any) -> dict[str, Any] | None:
    try:
        result = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return result if isinstance(result, dict) else None
