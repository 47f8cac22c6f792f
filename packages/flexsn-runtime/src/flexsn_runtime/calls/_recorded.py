"""Records a call as data: its allocations, operators and launches in order, and its results.

A recording is valid for tensors of one layout. It contains torch's operators as they are dispatched, and the functions
that are called through `noted`. A call can be repeated if each of its tensors is an argument, is the same object in
each call, is allocated in the call, or is a view of such a tensor. Two executors repeat a recording: a function in
Python, `Recording.repeat`, and the compiled launcher (see `native/_program.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from flexsn_codegen.targets._entry import Entry, watching
from flexsn_runtime._torch_private import TorchDispatchMode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
Repeat = Callable[[Sequence[Tensor | None]], list[Any]]
"""Type of a function that repeats a call with other tensors of the same layout, and returns the results."""

_aten = torch.ops.aten
_EMPTY = frozenset(
    (
        *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
        *(_aten.new_empty.default, _aten.new_empty_strided.default),
    )
)
_SAME = frozenset((_aten.detach.default, _aten.alias.default))
# Calls of these methods of tensors are faster than calls of the operators.
_METHODS = {_aten.copy_.default: "copy_", _aten.zero_.default: "zero_"}
_FILE = "<flexsn_runtime.calls>"


@dataclass(frozen=True, slots=True)
class TensorNumber:
    """Placeholder for a tensor in the arguments of a line. The arguments of the call have the first numbers."""

    number: int


class Allocated(NamedTuple):
    """A line that allocates a tensor. `into` is the tensor's number, as in the other lines."""

    into: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Fixed(NamedTuple):
    """A line that provides a tensor which is the same object in each call."""

    into: int
    tensor: Tensor


class Viewed(NamedTuple):
    """A line that creates a view of a tensor that the call has allocated."""

    into: int
    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Called(NamedTuple):
    """A line that calls a function.

    Attributes:
        into: numbers of the returned tensors; empty if the function returns no tensors, or tensors that already have
            numbers.
        function: an operator, or a function that was passed to `noted`.
        arguments, options: positional and keyword arguments of the function, with a `TensorNumber` for each tensor.
        entry: data for a launch by address, or `None`. With an entry, the first argument is the sequence of the
            kernel's tensors.
    """

    into: tuple[int, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    entry: Entry | None


class Bumped(NamedTuple):
    """A line that increases the version counters of tensors to which a kernel has written."""

    numbers: tuple[int, ...]


class Checked(NamedTuple):
    """A line that checks a number in the host's memory.

    Attributes:
        check: function that raises an error if the number is not 0.
    """

    number: Tensor
    check: Callable[[], object]


Line = Allocated | Fixed | Viewed | Called | Bumped | Checked


@dataclass(frozen=True)
class Recording:
    """A call as data.

    Attributes:
        given: for each argument of the call, True if it is a tensor, and False if it is `None`.
        lines: the lines, in order.
        results: numbers of the results; `None` for an absent result.
    """

    given: tuple[bool, ...]
    lines: tuple[Line, ...]
    results: tuple[int | None, ...]

    @cached_property
    def repeat(self) -> Repeat:
        """The executor in Python, a function that is generated from the lines."""
        text = _Text({})
        body = ["".join(f"value_{i}, " for i in range(len(self.given))) + "= given"] if self.given else []
        for line in self.lines:
            call = text.of_call(line)
            match line:
                case Checked() | Bumped() | Called(into=()):
                    body.append(call)
                case Called(into=(one,)):
                    body.append(f"value_{one} = {call}")
                case Called():
                    body.append(f"{''.join(f'value_{one}, ' for one in line.into)}= {call}")
                case _:
                    body.append(f"value_{line.into} = {call}")
        body.append(f"return [{', '.join('None' if one is None else f'value_{one}' for one in self.results)}]")
        source = "\n    ".join(["def repeat(given):", *body])
        exec(compile(source, _FILE, "exec"), text.constants)
        return cast(Repeat, text.constants.pop("repeat"))  # in its own globals, it would be a cycle


@dataclass(frozen=True, slots=True)
class _Text:
    """Generates the source of `Recording.repeat`.

    Attributes:
        constants: the objects that the source uses, by name.
    """

    constants: dict[str, Any]

    def of_call(self, line: Line) -> str:
        match line:
            case Allocated(_, shape, strides, dtype, device):
                return f"{self._constant(partial(torch.empty_strided, shape, strides, dtype=dtype, device=device))}()"
            case Fixed(_, tensor):
                return self._constant(tensor)
            case Viewed(_, base, shape, strides, offset, _):
                return f"value_{base}.as_strided({shape!r}, {strides!r}, {offset})"
            case Bumped(numbers):
                given = "".join(f"value_{number}, " for number in numbers)
                return f"{self._constant(torch.autograd.graph.increment_version)}(({given}))"
            case Checked(_, check):
                return f"{self._constant(check)}()"
            case Called(_, function, arguments, options, _):
                texts = [self._of(one) for one in arguments]
                if function in _METHODS and not options and len(texts) <= 2:
                    return f"{texts[0]}.{_METHODS[function]}({', '.join(texts[1:])})"
                texts += [f"{key}={self._of(value)}" for key, value in options.items()]
                return f"{self._constant(function)}({', '.join(texts)})"

    def _of(self, value: Any) -> str:
        if isinstance(value, TensorNumber):
            return f"value_{value.number}"
        if type(value) in (list, tuple) and any(True for _ in places((value,))):
            inner = "".join(f"{self._of(one)}, " for one in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


class _RecorderOfThread(threading.local):
    recorder: CallRecorder | None = None


current = _RecorderOfThread()
"""Its attribute `recorder` is the recorder of the call that this thread executes, or `None`."""


def noted(
    function: Callable[_Parameters, _Result], *arguments: _Parameters.args, **options: _Parameters.kwargs
) -> _Result:
    """Calls a function that launches kernels. An active recorder records this call.

    The function may write to any tensor in its arguments, and returns `None` or new tensors. If the function has a
    method `entry`, the first argument must be the sequence of the kernel's tensors. The method takes the other
    arguments, and returns the data for a launch by address.
    """
    recorder = current.recorder
    return function(*arguments, **options) if recorder is None else recorder.note(function, arguments, options)


def noted_check(check: Callable[[], object], number: Tensor) -> None:
    """Calls a function that raises an error if a number in the host's memory is not 0.

    Each repetition of the recording also checks the number.
    """
    recorder = current.recorder
    if recorder is None:
        check()
    else:
        recorder.check(check, number)


def written_by_kernel(tensors: Sequence[Tensor]) -> None:
    """Increases the version counters of tensors, as an operator that writes to them does.

    Each repetition of the recording also increases the counters.
    """
    torch.autograd.graph.increment_version(tensors)
    recorder = current.recorder
    if recorder is not None:
        recorder.bump(tensors)


def same_in_each_call(tensor: Tensor) -> Tensor:
    """Returns `tensor`. An active recorder records that each call reads this same object."""
    recorder = current.recorder
    if recorder is not None:
        recorder.fix(tensor)
    return tensor


def not_repeated(why: str) -> None:
    """Marks the current call as not repeatable, for this reason."""
    recorder = current.recorder
    if recorder is not None:
        recorder.refuse(why)


def recorded(
    call: Callable[[Sequence[Tensor | None]], Sequence[Any]],
    given: Sequence[Tensor | None],
    empty: Collection[int] = (),
) -> tuple[Sequence[Any], Recording | str]:
    """Returns the results of a call, and its recording or the reason why it cannot be recorded.

    Args:
        call: function that only reads its arguments, and computes no gradients. Its results are tensors or `None`.
        given: arguments of the call.
        empty: positions of results that the call allocates, but does not write.
    """
    # If one tensor is passed twice in this call, two different tensors may be passed in the next call.
    different = list[Tensor | None]()
    for tensor in given:
        is_known = tensor is not None and any(tensor is other for other in different)
        different.append(tensor.detach() if is_known and tensor is not None else tensor)
    recorder = CallRecorder(different)
    before, current.recorder, watched, watching.by = current.recorder, recorder, watching.by, recorder.launched
    try:
        with recorder:
            results = call(different)
    finally:
        current.recorder, watching.by = before, watched
    return results, recorder.recording(results, empty)


@dataclass(slots=True)
class _RecordedMemory:
    """The memory of one or more tensors of a call.

    Attributes:
        base: number of the tensor for which the call allocated the memory; `None` for other memory.
        written: True if values have been written to the memory.
    """

    base: int | None
    written: bool


class CallRecorder(TorchDispatchMode):
    """Records a call while it runs.

    Attributes:
        why: the reason why the call cannot be repeated; `None` if it can be repeated.
    """

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why: str | None = None
        self._paused = False
        self._alive: dict[int, Tensor] = {}  # tensors by number. References keep ids and addresses unique
        self._numbers: dict[int, int] = {}
        self._memory: dict[int, _RecordedMemory] = {}
        self._lines: list[tuple[Line, frozenset[int], bool]] = []  # line, numbers that it uses, True if it writes
        self._given = tuple([tensor is not None for tensor in given])
        self._count = len(given)
        for i, tensor in enumerate(given):
            if tensor is not None:
                self._alive[i], self._numbers[id(tensor)] = tensor, i
                self._memory[_address(tensor)] = _RecordedMemory(None, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        result = func(*args, **options)
        if self.why is None and not self._paused:
            self._operator(func, args, options, result)
        return result

    def note(self, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Implements `noted`."""
        if self._paused:
            return function(*arguments, **options)
        result = self._unseen(function, *arguments, **options)
        entry = getattr(function, "entry", None)
        told = None if entry is None else entry(*arguments[1:], **options)
        self.launched(function, arguments, told, options, result)
        return result

    def launched(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        entry: Entry | None,
        options: dict[str, Any] | None = None,
        result: Any = None,
    ) -> None:
        """Records a launch that has already run."""
        if self._paused or self.why is not None:
            return
        for tensor in _tensors((arguments, options)):
            if _address(tensor) in self._memory:
                self._memory[_address(tensor)].written = True
        self._called(result, function, arguments, options or {}, entry, writes=True)

    def check(self, check: Callable[[], object], number: Tensor) -> None:
        """Implements `noted_check`."""
        self._unseen(check)
        self._lines.append((Checked(number, check), frozenset(), True))

    def bump(self, tensors: Sequence[Tensor]) -> None:
        """Implements `written_by_kernel`."""
        numbers = tuple(map(self._known, tensors))
        self._lines.append((Bumped(numbers), frozenset(numbers), True))

    def _unseen(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before, self._paused = self._paused, True
        try:
            return function(*arguments, **options)
        finally:
            self._paused = before

    def fix(self, tensor: Tensor) -> None:
        """Implements `same_in_each_call`."""
        if id(tensor) not in self._numbers:
            self._memory[_address(tensor)] = _RecordedMemory(None, True)
            self._lines.append((Fixed(self._new(tensor), tensor), frozenset(), False))

    def refuse(self, why: str) -> None:
        """Marks the call as not repeatable, for this reason. Later reasons are ignored."""
        self.why = self.why or why

    def recording(self, results: Sequence[Any], empty: Collection[int] = ()) -> Recording | str:
        """Returns the recording of the call, or the reason why it cannot be repeated.

        Args:
            results: results of the call.
            empty: see `recorded`.
        """
        numbers = tuple([None if one is None else self._known(one) for one in results])
        for i, one in enumerate(results):
            if i not in empty:
                self._check_written(one)
        if self.why is not None:
            return self.why
        needed, lines = {*numbers}, []
        for line, used, writes in reversed(self._lines):
            match line:
                case Called():
                    made = line.into
                case Bumped() | Checked():
                    made = ()
                case _:
                    made = (line.into,)
            if writes or not needed.isdisjoint(made):
                needed |= used
                lines.append(line)
        return Recording(self._given, tuple(reversed(lines)), numbers)

    # -- recorded events -------------------------------------------------------------------------------------------

    def _operator(self, func: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> None:
        given = [*_tensors((args, options))]
        if not given and not any(True for _ in _tensors(result)):
            return  # an operator without tensors, such as `aten.promote_types`
        written = _written(func, args, options)
        if func.overloadpacket is _aten.set_ or any(not isinstance(one, Tensor) for one in _each(result)):
            self.refuse(f"{func} returns a value that is not a tensor")
            return
        if torch.Tag.dynamic_output_shape in func.tags:
            self.refuse(f"the shape of the result of {func} depends on values")
            return
        for tensor in given:
            memory = self._memory.get(_address(tensor))
            if memory is not None and any(tensor is one for one in written):
                memory.written = True
            elif not func.is_view:
                self._check_written(tensor)
        if func in _SAME:
            self._numbers.setdefault(id(result), self._known(args[0]))
            self._alive[self._next()] = result
        elif func in _EMPTY:
            shape, strides = tuple(result.shape), result.stride()
            line = Allocated(self._made(result, empty=True), shape, strides, result.dtype, result.device)
            self._lines.append((line, frozenset(), False))
        elif not (found := _each(result)) or not all(self._seen_from_its_base(one) for one in found):
            self._called(result, func, args, options, None, writes=bool(written))

    def _seen_from_its_base(self, result: Tensor) -> bool:
        """Records a view of an allocated tensor as a view of the whole allocation. Returns False for other tensors."""
        if id(result) in self._numbers or result.is_neg() or result.is_conj():
            return False
        memory = self._memory.get(_address(result))
        if memory is None or memory.base is None:
            return False
        base = self._alive[memory.base]
        if base.dtype != result.dtype or base.device != result.device:
            return False
        place = tuple(result.shape), result.stride(), int(result.storage_offset())
        if place == (tuple(base.shape), base.stride(), int(base.storage_offset())):
            self._numbers[id(result)] = memory.base
            self._alive[self._next()] = result
        else:
            line = Viewed(self._new(result), memory.base, *place, result.dtype)
            self._lines.append((line, frozenset((memory.base,)), False))
        return True

    def _called(
        self,
        result: Any,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: dict[str, Any],
        entry: Entry | None,
        *,
        writes: bool,
    ) -> None:
        """Records a call and its results."""
        found = _each(result)
        into: tuple[int, ...] = ()
        given, named = self._placed(tuple(arguments)), {key: self._placed(value) for key, value in options.items()}
        used = frozenset(places((given, named)))
        if any(id(one) not in self._numbers for one in found):
            into = tuple([self._made(one) for one in found])
        self._lines.append((Called(into, function, given, named, entry), used, writes))

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _new(self, tensor: Tensor) -> int:
        number = self._next()
        self._alive[number], self._numbers[id(tensor)] = tensor, number
        return number

    def _made(self, tensor: Tensor, *, empty: bool = False) -> int:
        """Returns the number of a tensor that a line returns."""
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        number = self._new(tensor)
        if _address(tensor) not in self._memory:
            base = number if tensor.untyped_storage().nbytes() == tensor.nbytes else None
            self._memory[_address(tensor)] = _RecordedMemory(base, not empty)
        return number

    def _known(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            self.refuse(f"it reads a tensor {tuple(tensor.shape)} that is not among its arguments")
            return -1
        return number

    def _check_written(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.numel():
            memory = self._memory.get(_address(tensor))
            if memory is not None and not memory.written:
                self.refuse("an operation that is not recorded writes to its memory")

    def _placed(self, value: Any) -> Any:
        """Returns a copy of the value with a `TensorNumber` for each tensor."""
        if isinstance(value, Tensor):
            return TensorNumber(self._known(value))
        if type(value) in (list, tuple):
            return type(value)([self._placed(one) for one in value])
        return value


def places(value: Any) -> Iterator[int]:
    """Iterates over the numbers of all tensors in the arguments of a line."""
    if isinstance(value, TensorNumber):
        yield value.number
    elif isinstance(value, list | tuple):
        for one in value:
            yield from places(one)
    elif isinstance(value, dict):
        yield from places([*value.values()])


def _address(tensor: Tensor) -> int:
    """Returns an integer that is equal for tensors in the same memory."""
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
    """Returns the arguments that an operator writes to."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            found += _tensors(args[i] if i < len(args) else options.get(argument.name))
    return found
