"""Places that a core reads. Each place can be read again, and its value compared with the value read before."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from operator import is_
from types import CellType, MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from flexsn_graph._torch_private_modules import without_fx_wrapper
from flexsn_graph.reads._values import MISSING, same

# Returns the name of an object in the source of the generated check.
Bind = Callable[[Any], str]

ANY_NAME = "*"

_LOOKUP_ERRORS = (KeyError, AttributeError, ValueError, IndexError, ReferenceError, TypeError)


class NotTwinsError(Exception):
    """Raised if the other core reads different values, or if an object has no counterpart."""


class Counterparts(Protocol):
    """Maps objects of one core to objects of another core. See `_twins.py`."""

    def counterpart(self, value: Any) -> Any:
        """Returns the object of the other core that corresponds to `value`, or raises `NotTwinsError`."""

    def function(self, function: Any) -> Any:
        """Returns the counterpart of a function that a place calls."""

    def pair(self, value: Any, other: Any) -> None:
        """Registers two values as counterparts, or raises `NotTwinsError`."""


class Place:
    """A location from which a core read a value.

    Attributes:
        name: the name in messages, such as ``self.tau``.
        in_backward: True if a backward formula reads the place.
        in_forward: True if the step itself reads the place. `in_backward` and `in_forward` may both be True.
    """

    __slots__ = ("in_backward", "in_forward", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_backward = self.in_forward = False

    @property
    def key(self) -> Hashable:
        """Identifies the place. Equal places have equal keys."""
        raise NotImplementedError

    @property
    def owner(self) -> tuple[Any, Any]:
        """The object that contains the place, and the place's name or key. `None` as the key means the whole object."""
        raise NotImplementedError

    def get(self) -> Any:
        """Returns the value in the place, or raises an error if the place has no value."""
        raise NotImplementedError

    def expression(self, bind: Bind) -> str:
        """Python source that computes the result of `get`."""
        raise NotImplementedError

    def counterpart(self, twins: Counterparts) -> Place:
        """The corresponding place in another core."""
        raise NotImplementedError

    def pair(self, twins: Counterparts, before: Any, other: Any) -> None:
        """Compares the value that was read from this place with the value in its counterpart.

        Raises:
            NotTwinsError: the values differ.
        """
        twins.pair(before, other)

    def _compare(self, before: Any, other: Any) -> None:
        if not self.same(other, before):
            raise NotTwinsError

    def read(self) -> Any:
        """Returns the value in the place, or `MISSING`."""
        try:
            return self.get()
        except _LOOKUP_ERRORS:
            return MISSING

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        """Python source that is true if the place still has the value `before`.

        `None` if the place does not have to be compared.

        Args:
            token: name of the variable that contains `self.token(before)` in this source.
        """
        if before is MISSING:
            return f"{bind(self.read)}() is {token}"
        return f"{self.expression(bind)} is {token}"

    def token(self, before: Any) -> Any:
        """The object with which the condition compares."""
        return before

    def same(self, current: Any, before: Any) -> bool:
        """True if a core behaves in the same way whether it reads `current` or `before`."""
        return same(current, before)


class DictEntry(Place):
    """`mapping[key]` of a dictionary, such as an attribute, a global variable or an item."""

    __slots__ = ("_key", "_mapping")

    def __init__(self, name: str, mapping: Mapping[Any, Any], key: Any) -> None:
        super().__init__(name)
        self._mapping = mapping
        self._key = key

    @property
    def key(self) -> Hashable:
        return "entry", id(self._mapping), self._key

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._mapping, self._key

    def counterpart(self, twins: Counterparts) -> Place:
        return DictEntry(self.name, twins.counterpart(self._mapping), twins.counterpart(self._key))

    def get(self) -> Any:
        return self._mapping[self._key]

    def expression(self, bind: Bind) -> str:
        return f"{bind(self._mapping)}[{self._key!r}]"

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        if before is MISSING:
            return f"{self._key!r} not in {bind(self._mapping)}"
        return super().condition(before, token, bind)


class ClassEntry(DictEntry):
    """An entry of a class. A class returns a new mapping object each time its `__dict__` is read."""

    __slots__ = ("_cls",)

    def __init__(self, name: str, cls: type, key: str) -> None:
        super().__init__(name, cls.__dict__, key)
        self._cls = cls

    @property
    def key(self) -> Hashable:
        return "class", self._cls, self._key

    def get(self) -> Any:
        return without_fx_wrapper(super().get())

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._cls, self._key

    def counterpart(self, twins: Counterparts) -> Place:
        return ClassEntry(self.name, self._cls, self._key)


class ClassKeys(Place):
    """The names that a class defines. A new name may take precedence over a name that was read.

    Args:
        relevant: the names that were read from objects of the class. If `relevant` contains `ANY_NAME`, all names of
            the class were read.
    """

    __slots__ = ("_cls", "_entries", "_relevant")

    def __init__(self, cls: type, relevant: set[str]) -> None:
        super().__init__(f"the names in class {cls.__qualname__}")
        self._cls = cls
        self._entries = cls.__dict__
        self._relevant = relevant

    @property
    def key(self) -> Hashable:
        return "keys", self._cls

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._cls, None

    def counterpart(self, twins: Counterparts) -> Place:
        return ClassKeys(self._cls, set(self._relevant))

    def pair(self, twins: Counterparts, before: Any, other: Any) -> None:
        self._compare(before, other)

    def get(self) -> Any:
        return tuple(self._entries)

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        return f"{bind(len)}({bind(self._entries)}) == {token}"

    def token(self, before: Any) -> Any:
        return len(before)

    def same(self, current: Any, before: Any) -> bool:
        if ANY_NAME in self._relevant:
            return set(current) == set(before)
        return not any(name in self._relevant or name[:2] == "__" == name[-2:] for name in set(current) ^ set(before))


class Cell(Place):
    """A closure variable."""

    __slots__ = ("_cell",)

    def __init__(self, name: str, cell: CellType) -> None:
        super().__init__(name)
        self._cell = cell

    @property
    def key(self) -> Hashable:
        return "cell", id(self._cell)

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._cell, "cell_contents"

    def counterpart(self, twins: Counterparts) -> Place:
        return Cell(self.name, twins.counterpart(self._cell))

    def get(self) -> Any:
        return self._cell.cell_contents

    def expression(self, bind: Bind) -> str:
        return f"{bind(self._cell)}.cell_contents"


class Attribute(Place):
    """`owner.attribute`, if reading it runs no user code."""

    __slots__ = ("_attribute", "_owner")

    def __init__(self, name: str, owner: Any, attribute: str) -> None:
        super().__init__(name)
        self._owner = owner
        self._attribute = attribute

    @property
    def key(self) -> Hashable:
        return "attribute", id(self._owner), self._attribute

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._owner, self._attribute

    def counterpart(self, twins: Counterparts) -> Place:
        return Attribute(self.name, twins.counterpart(self._owner), self._attribute)

    def get(self) -> Any:
        return getattr(self._owner, self._attribute)

    def expression(self, bind: Bind) -> str:
        return f"{bind(self._owner)}.{self._attribute}"


class Result(Place):
    """`function(*arguments)`, where the function has no side effects."""

    __slots__ = ("_arguments", "_function", "kind")

    def __init__(self, name: str, kind: str, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(name)
        self.kind = kind
        self._function = function
        self._arguments = arguments

    @property
    def key(self) -> Hashable:
        return "result", self.kind, *map(id, self._arguments)

    def counterpart(self, twins: Counterparts) -> Place:
        arguments = map(twins.counterpart, self._arguments)
        return type(self)(self.name, self.kind, twins.function(self._function), *arguments)

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._arguments[0] if self._arguments else self._function, self.kind

    def get(self) -> Any:
        return self._function(*self._arguments)

    def expression(self, bind: Bind) -> str:
        return f"{bind(self._function)}({', '.join(map(bind, self._arguments))})"


class Equal(Result):
    """The result of a function that creates a new object in each call. The result is compared by equality."""

    __slots__ = ()

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        return f"{self.expression(bind)} == {token}"

    def pair(self, twins: Counterparts, before: Any, other: Any) -> None:
        self._compare(before, other)

    def same(self, current: Any, before: Any) -> bool:
        return bool(current == before)


class Content(Place):
    """All elements of a container in order. For a dictionary, first all keys and then all values."""

    __slots__ = ("_container", "_length", "_read")

    def __init__(self, name: str, container: Any) -> None:
        super().__init__(name)
        self._container = container
        base = base_of(container)
        assert base is not None
        self._read, self._length = _READERS[base]

    @property
    def key(self) -> Hashable:
        return "content", id(self._container)

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._container, None

    def counterpart(self, twins: Counterparts) -> Place:
        return type(self)(self.name, twins.counterpart(self._container))

    def pair(self, twins: Counterparts, before: Any, other: Any) -> None:
        if len(before) != len(other):
            raise NotTwinsError
        for element, other_element in zip(before, other, strict=True):
            twins.pair(element, other_element)

    def get(self) -> Any:
        return list(self._read(self._container))

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        container = bind(self._container)
        if type(self._container) in _READERS and not before:
            return f"not {container}"
        read, length = bind(self._read), bind(self._length)
        pairs = isinstance(self._container, dict | MappingProxyType)
        elements = len(before) // 2 if pairs else len(before)
        return f"{length}({container}) == {elements} and all(map({bind(is_)}, {read}({container}), {token}))"

    def same(self, current: Any, before: Any) -> bool:
        # Tensors in the container have their own places.
        return len(current) == len(before) and all(
            (isinstance(a, Tensor) and isinstance(b, Tensor)) or same(a, b)
            for a, b in zip(current, before, strict=True)
        )


class TensorAttributes(Content):
    """Attributes that were set on a tensor, except for attributes that torch's compiler sets."""

    __slots__ = ()

    def get(self) -> Any:
        return _list_user_attributes(self._container)

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        container, current = bind(self._container), bind(_list_user_attributes)
        if not before:
            return f"(not {container} or not {current}({container}))"
        return f"{bind(_are_identical)}({current}({container}), {token})"


def _list_user_attributes(attributes: dict[str, Any]) -> list[Any]:
    user_attributes = {name: value for name, value in attributes.items() if not name.startswith("_dynamo_")}
    return [*user_attributes.keys(), *user_attributes.values()]


def _are_identical(current: list[Any], before: list[Any]) -> bool:
    return len(current) == len(before) and all(map(is_, current, before))


class Cached(Place):
    """Entries in the cache of a `functools.lru_cache` function at the time of the trace."""

    __slots__ = ("_cache",)

    def __init__(self, name: str, cache: dict[Any, Any]) -> None:
        super().__init__(name)
        self._cache = cache

    @property
    def key(self) -> Hashable:
        return "cached", id(self._cache)

    @property
    def owner(self) -> tuple[Any, Any]:
        return self._cache, None

    def counterpart(self, twins: Counterparts) -> Place:
        return Cached(self.name, twins.counterpart(self._cache))

    def pair(self, twins: Counterparts, before: Any, other: Any) -> None:
        self._compare(before, other)

    def get(self) -> Any:
        return dict(self._cache)

    def condition(self, before: Any, token: str, bind: Bind) -> str | None:
        if not before:
            return None
        current = f"map({bind(self._cache)}.get, {token})"
        return f"all(map({bind(is_)}, {current}, {token}.values()))"

    def same(self, current: Any, before: Any) -> bool:
        return all(key in current and current[key] is value for key, value in before.items())


def _list_entries(mapping: dict[Any, Any]) -> Iterable[Any]:
    return chain(dict.keys(mapping), dict.values(mapping))


def _list_ordered_entries(mapping: OrderedDict[Any, Any]) -> Iterable[Any]:
    return chain(OrderedDict.keys(mapping), OrderedDict.values(mapping))


def _list_viewed_entries(mapping: MappingProxyType[Any, Any]) -> Iterable[Any]:
    return chain(mapping.keys(), mapping.values())


# For each type, a function that returns the elements, and a function that counts them. Neither function calls
# `__iter__` or `__len__` of subclasses.
_READERS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[[Any], int]]] = {
    list: (list.__iter__, list.__len__),
    OrderedDict: (_list_ordered_entries, dict.__len__),
    dict: (_list_entries, dict.__len__),
    set: (set.__iter__, set.__len__),
    deque: (deque.__iter__, deque.__len__),
    MappingProxyType: (_list_viewed_entries, len),
}


def base_of(container: Any) -> type | None:
    """The mutable container type that `container` is an instance of, or `None`."""
    return next((kind for kind in type(container).__mro__ if kind in _READERS), None)
