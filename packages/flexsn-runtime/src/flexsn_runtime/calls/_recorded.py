"""A call that is recorded once and repeated: its operators and launches in order.

A recording is of tensors of one layout. It sees torch's operators as they are dispatched, and what else works on
tensors where that says so, by `noted`. Each tensor of a call is one that is given, one that is allocated in the call,
or a view of either; a call that reads another one is not repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from flexsn_runtime._torch_private import TorchDispatchMode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
Repeat = Callable[[Sequence[Tensor | None]], list[Any]]
"""Makes the call again with other tensors of the same layout; gives what it returns."""

_aten = torch.ops.aten
_EMPTY = frozenset(
    (
        *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
        *(_aten.new_empty.default, _aten.new_empty_strided.default),
    )
)
_SAME = frozenset((_aten.detach.default, _aten.alias.default))
# Shorter than a call of the operator.
_METHODS = {_aten.copy_.default: "copy_", _aten.zero_.default: "zero_"}
_FILE = "<flexsn_runtime.calls>"


class _Recording(threading.local):
    recorder: CallRecorder | None = None


_current = _Recording()


def noted(
    function: Callable[_Parameters, _Result], *arguments: _Parameters.args, **options: _Parameters.kwargs
) -> _Result:
    """Calls a function, and has a recorded call repeat that as it is: a launch, or another function that launches.

    The function may write to any tensor among its arguments, and returns nothing or new tensors.
    """
    recorder = _current.recorder
    return function(*arguments, **options) if recorder is None else recorder.note(function, arguments, options)


def not_repeated(why: str) -> None:
    """Says that what happens now cannot be recorded."""
    recorder = _current.recorder
    if recorder is not None:
        recorder.refuse(why)


def recorded(call: Callable[[], Sequence[Any]], given: Sequence[Tensor | None]) -> tuple[Sequence[Any], Repeat | str]:
    """The results of a call, and what repeats it; or, in words, why nothing does.

    Args:
        call: computes with nothing but `given`, without gradients. Its results are tensors or `None`.
    """
    recorder = CallRecorder(given)
    _current.recorder = recorder
    try:
        with recorder:
            results = call()
    finally:
        _current.recorder = None
    return results, recorder.repeat(results)


@dataclass(slots=True)
class _Event:
    """A line of the repeated call.

    Attributes:
        writes: it changes tensors or launches, and is not left out where no one reads its results.
        made: names of its results.
        used: names that it reads.
        text: the line.
    """

    writes: bool
    made: tuple[str, ...]
    used: frozenset[str]
    text: str


@dataclass(slots=True)
class _Memory:
    """Memory of a call's tensors.

    Attributes:
        base: the name of the tensor that it was allocated as; `None`: it is given.
        written: something is in it.
    """

    base: str | None
    written: bool


class CallRecorder(TorchDispatchMode):
    """Notes a call on these tensors.

    Attributes:
        why: the call cannot be repeated, in words.
    """

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why: str | None = None
        self._paused = False
        self._alive: list[Tensor] = []  # an id belongs to one tensor, and an address to one memory
        self._names: dict[int, str] = {}
        self._memory: dict[int, _Memory] = {}
        self._events: list[_Event] = []
        self._constants: dict[str, Any] = {}
        self._given = len(given)
        for i, tensor in enumerate(given):
            if tensor is not None:
                self._name(tensor, f"given_{i}")
                self._memory[_address(tensor)] = _Memory(None, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        if self._paused:
            return func(*args, **options)
        result = func(*args, **options)
        if self.why is None:
            self._operator(func, args, options, result)
        return result

    def note(self, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """As `noted`."""
        if self._paused:
            return function(*arguments, **options)
        self._paused = True
        try:
            result = function(*arguments, **options)
        finally:
            self._paused = False
        if self.why is None:
            for tensor in _tensors((arguments, options)):
                if _address(tensor) in self._memory:
                    self._memory[_address(tensor)].written = True
            text, used = self._call(self._constant(function), arguments, options)
            self._made(result, text, used, writes=True)
        return result

    def refuse(self, why: str) -> None:
        """The call is not to be repeated. The first reason counts."""
        self.why = self.why or why

    def repeat(self, results: Sequence[Any]) -> Repeat | str:
        """The function that repeats the call, or why there is none."""
        names = ["None" if one is None else self._known(one) for one in results]
        for one in results:
            self._check_written(one)
        if self.why is not None:
            return self.why
        needed, lines = {*names}, []
        for event in reversed(self._events):
            if event.writes or not needed.isdisjoint(event.made):
                needed |= event.used
                lines.append(event.text)
        given = "".join(f"given_{i}, " for i in range(self._given))
        body = [*([f"{given}= given"] if given else []), *reversed(lines), f"return [{', '.join(names)}]"]
        source = "\n    ".join(["def repeat(given):", *body])
        scope = dict(self._constants)
        exec(compile(source, _FILE, "exec"), scope)
        return cast(Repeat, scope["repeat"])

    # -- what happens ----------------------------------------------------------------------------------------------

    def _operator(self, func: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> None:
        written = _written(func, args, options)
        if func is _aten.set_.source_Tensor or any(not isinstance(one, Tensor) for one in _each(result)):
            self.refuse(f"{func} gives more than tensors")
            return
        for tensor in _tensors((args, options)):
            memory = self._memory.get(_address(tensor))
            if memory is not None and any(tensor is one for one in written):
                memory.written = True
            elif not func.is_view:
                self._check_written(tensor)
        if func in _SAME:
            self._name(result, self._known(args[0]))
        elif func in _EMPTY:
            allocate = partial(
                torch.empty_strided, tuple(result.shape), result.stride(), dtype=result.dtype, device=result.device
            )
            self._made(result, f"{self._constant(allocate)}()", frozenset(), writes=False, empty=True)
        elif self._seen_from_its_base(result):
            pass
        elif func in _METHODS and not options and len(args) <= 2:
            names = [self._known(one) if isinstance(one, Tensor) else self._constant(one) for one in args]
            self._made(result, f"{names[0]}.{_METHODS[func]}({', '.join(names[1:])})", frozenset(names), writes=True)
        else:
            text, used = self._call(self._constant(func), args, options)
            self._made(result, text, used, writes=bool(written))

    def _seen_from_its_base(self, result: Any) -> bool:
        """Notes a view of what the call has allocated as one of its allocation; False: it is none."""
        if not isinstance(result, Tensor) or id(result) in self._names or result.is_neg() or result.is_conj():
            return False
        memory = self._memory.get(_address(result))
        if memory is None or memory.base is None:
            return False
        base = next(one for one in self._alive if self._names[id(one)] == memory.base)
        if base.dtype != result.dtype or base.device != result.device:
            return False
        place = tuple(result.shape), result.stride(), int(result.storage_offset())
        if place == (tuple(base.shape), base.stride(), int(base.storage_offset())):
            self._name(result, memory.base)
        else:
            text = f"{memory.base}.as_strided({place[0]!r}, {place[1]!r}, {place[2]})"
            self._made(result, text, frozenset((memory.base,)), writes=False)
        return True

    def _made(self, result: Any, text: str, used: frozenset[str], *, writes: bool, empty: bool = False) -> None:
        """Notes a line and what it gives."""
        found = _each(result)
        new = [one for one in found if id(one) not in self._names]
        for one in new:
            self._name(one, f"value_{len(self._alive)}")
            if _address(one) not in self._memory:
                base = self._names[id(one)] if one.untyped_storage().nbytes() == one.nbytes else None
                self._memory[_address(one)] = _Memory(base, not empty)
        names = tuple([self._names[id(one)] for one in found])
        if new and isinstance(result, Tensor):
            text = f"{names[0]} = {text}"
        elif new:
            text = f"{', '.join(names)}, = {text}"
        self._events.append(_Event(writes, names if new else (), used, text))

    # -- names -----------------------------------------------------------------------------------------------------

    def _name(self, tensor: Tensor, name: str) -> None:
        if id(tensor) not in self._names:
            self._alive.append(tensor)
            self._names[id(tensor)] = name

    def _known(self, tensor: Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            self.refuse(f"it reads a tensor {tuple(tensor.shape)} that it is not given")
            return "None"
        return name

    def _check_written(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.numel():
            memory = self._memory.get(_address(tensor))
            if memory is not None and not memory.written:
                self.refuse("something writes to its memory that is not noted")

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants[name] = value
        return name

    def _call(self, function: str, arguments: Sequence[Any], options: dict[str, Any]) -> tuple[str, frozenset[str]]:
        used: set[str] = set()
        given = [self._text(one, used) for one in arguments]
        given += [f"{key}={self._text(value, used)}" for key, value in options.items()]
        return f"{function}({', '.join(given)})", frozenset(used)

    def _text(self, value: Any, used: set[str]) -> str:
        """An argument in the source; the names of its tensors come to those that are used."""
        if isinstance(value, Tensor):
            name = self._known(value)
            used.add(name)
            return name
        if type(value) in (list, tuple) and any(True for _ in _tensors(value)):
            inner = "".join(f"{self._text(one, used)}, " for one in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        return self._constant(value)


def _address(tensor: Tensor) -> int:
    """Equal for tensors in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def _each(result: Any) -> list[Any]:
    if result is None:
        return []
    return [*result] if isinstance(result, list | tuple) else [result]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _written(func: Any, args: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            found += _tensors(args[i] if i < len(args) else options.get(argument.name))
    return found
