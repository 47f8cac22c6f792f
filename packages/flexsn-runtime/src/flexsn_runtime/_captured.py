"""What a core reads besides its arguments, and where it is, so that what is re-assigned is seen.

A parameter keeps its identity when it is updated or moved; a buffer does not (`module.to()` puts a new tensor
in its place), nor does a closure variable that is assigned again. So a captured tensor is remembered by its
place: `cell.cell_contents`, `module._buffers["decay"]`, `fn.__globals__["tau"]`. Numbers, functions and
objects become part of the traced step; they are remembered with their places, too, to be compared.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Place = Callable[[], Any]

_SCALARS = (bool, int, float, complex, str, bytes, types.NoneType)
# Their functions read nothing of the user's.
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "numpy", "triton"),
    *("flexsn_graph", "flexsn_codegen", "flexsn_hop", "flexsn_runtime"),
}
# A core that reaches a whole data set is not searched to the end.
_MAX_PLACES = 20_000


class Captured:
    """The tensors that a core captured when it was traced, and what else the trace depends on.

    Args:
        core: the step function.
        tensors: what the tracer met. One that is in no known place (made in a C extension, say) is held.
    """

    def __init__(self, core: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        search = _Search(core)
        self._tensors = [_places_of(tensor, search.tensors) for tensor in tensors]
        # What the code assigns by itself is no constant.
        read = search.names - search.assigned
        self._constants = [
            (place, value) for place, value, name in search.constants if name is None or name in read
        ]

    def fetch(self) -> tuple[Tensor, ...] | None:
        """The tensors that are in their places now; `None` when the core is to be traced again.

        That is when a constant was assigned anew, a tensor is gone or was replaced by something else, or one
        tensor that was in two places was replaced in one of them.
        """
        try:
            for place, value in self._constants:
                now = place()
                if now is not value and not _same(now, value):
                    return None
            tensors: list[Tensor] = []
            for first, *others in self._tensors:
                tensor = first()
                if not isinstance(tensor, Tensor):
                    return None
                for place in others:
                    if place() is not tensor:
                        return None
                tensors.append(tensor)
        except _MISSING:
            return None
        return tuple(tensors)


_GONE = object()
# What reading a place raises when nothing is there.
_MISSING = (KeyError, AttributeError, ValueError, IndexError)


def _read(place: Place) -> Any:
    try:
        return place()
    except _MISSING:
        return _GONE


def _same(now: Any, before: Any) -> bool:
    # Python takes 1 and 1.0 and True for equal; a trace does not.
    return type(now) is type(before) and isinstance(now, _SCALARS) and bool(now == before)


def _places_of(tensor: Tensor, found: Sequence[tuple[Place, Tensor]]) -> list[Place]:
    places = [place for place, value in found if value is tensor]
    return places or [partial(_itself, tensor)]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class _Edge:
    """A way from an object to another.

    Attributes:
        name: of the attribute, if it is one: it counts when the code reads such a name.
        compared: whether what is found there can be assigned anew.
        called: whether what is found there may be called by the core.
    """

    place: Place
    name: str | None = None
    compared: bool = True
    called: bool = True


class _Search:
    """All places that can be reached from a core.

    Attributes:
        tensors: places of tensors.
        constants: places of anything else that can be assigned anew, with the attribute's name.
        names: what the code of the core, and of all that it calls, uses by name.
        assigned: those that it assigns.
    """

    def __init__(self, core: Callable[..., Any]) -> None:
        self.tensors: list[tuple[Place, Tensor]] = []
        self.constants: list[tuple[Place, Any, str | None]] = []
        self.names: set[str] = set()
        self.assigned: set[str] = set()
        self._count = 0
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, str | None, bool]] = deque()
        self._classes: dict[type, set[str]] = {}  # with the attributes that have been looked at
        self._enter(core, None, called=True)
        while self._queue:
            owner, name, called = self._queue.popleft()
            for edge in self._edges(owner, called):
                self._follow(edge, edge.name or name)
            if not self._queue:
                self._enter_class_attributes()

    def _enter(self, value: Any, name: str | None, *, called: bool) -> None:
        if id(value) in self._seen or isinstance(value, (*_SCALARS, types.ModuleType)):
            return
        if isinstance(value, type | types.FunctionType) and _is_library(value):
            return
        self._seen.add(id(value))
        self._queue.append((value, name, called))

    def _follow(self, edge: _Edge, name: str | None) -> None:
        self._count += 1
        if self._count > _MAX_PLACES:
            return
        value = _read(edge.place)
        if isinstance(value, Tensor):
            self.tensors.append((edge.place, value))
        elif value is not _GONE:
            if edge.compared and not isinstance(value, types.ModuleType):
                self.constants.append((edge.place, value, name))
            self._enter(value, name, called=edge.called)

    def _enter_class_attributes(self) -> None:
        """Looks at those attributes of the classes whose names some code reads."""
        for owner, looked_at in list(self._classes.items()):
            for name in (self.names & vars(owner).keys()) - looked_at:
                looked_at.add(name)
                is_constant = isinstance(vars(owner)[name], _SCALARS)
                self._follow(_Edge(partial(vars(owner).__getitem__, name), compared=is_constant), None)

    def _edges(self, owner: Any, called: bool) -> Iterator[_Edge]:
        if isinstance(owner, types.FunctionType):
            names = self._read_code(owner.__code__)
            yield from (_Edge(partial(getattr, cell, "cell_contents")) for cell in owner.__closure__ or ())
            yield from _items(owner.__globals__, [n for n in names if n in owner.__globals__])
            yield from _attributes(owner, "__defaults__", "__kwdefaults__")
        elif isinstance(owner, partial):
            yield from _attributes(owner, "func", "args", "keywords")
        elif isinstance(owner, types.MethodType):
            yield from _attributes(owner, "__func__")
            yield _Edge(partial(getattr, owner, "__self__"), compared=False, called=False)
        elif isinstance(owner, staticmethod | classmethod):
            yield from _attributes(owner, "__func__")
        elif isinstance(owner, property):
            yield from _attributes(owner, "fget")
        elif isinstance(owner, MutableMapping):
            yield from _items(owner, list(owner))
        elif isinstance(owner, list | tuple):
            yield from _items(owner, range(len(owner)))
        elif isinstance(owner, type):
            self._add_class(owner)
            if issubclass(owner, torch.autograd.Function):
                yield from _attributes(owner, "forward", "backward", "setup_context")
        else:
            self._add_class(type(owner))
            method = "forward" if isinstance(owner, torch.nn.Module) else "__call__"
            if called and isinstance(getattr(type(owner), method, None), types.FunctionType):
                yield from _attributes(type(owner), method)
            yield from _instance_attributes(owner)

    def _add_class(self, owner: type) -> None:
        for kind in owner.__mro__:
            if not _is_library(kind):
                self._classes.setdefault(kind, set())

    def _read_code(self, code: types.CodeType) -> set[str]:
        """Names that a function, and the functions written in it, use: globals and attributes."""
        names = set(code.co_names)
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL"):
                self.assigned.add(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= self._read_code(constant)
        self.names |= names
        return names


def _instance_attributes(owner: Any) -> Iterator[_Edge]:
    attributes = getattr(owner, "__dict__", {})
    registries = ("_parameters", "_buffers", "_modules") if isinstance(owner, torch.nn.Module) else ()
    for mapping in (attributes, *(attributes[name] for name in registries)):
        names = [name for name in mapping if name not in registries]
        yield from (_Edge(partial(mapping.__getitem__, name), name) for name in names)
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield _Edge(partial(getattr, owner, name), name)


def _attributes(owner: Any, *names: str) -> Iterator[_Edge]:
    """Parts of an object that cannot be assigned anew, or never are."""
    return (_Edge(partial(getattr, owner, name), compared=False) for name in names)


def _items(container: Any, keys: Sequence[Any]) -> Iterator[_Edge]:
    return (_Edge(partial(container.__getitem__, key)) for key in keys)


def _is_library(value: type | types.FunctionType) -> bool:
    return (value.__module__ or "").partition(".")[0] in _LIBRARIES
