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
        is_tensor: for each argument of the call, True if it is a tensor, and False if it is `None`.
        lines: the lines, in order.
        results: numbers of the results; `None` for an absent result.
    """

    is_tensor: tuple[bool, ...]
    lines: tuple[Line, ...]
    results: tuple[int | None, ...]

    @cached_property
    def repeat(self) -> Repeat:
        """The executor in Python, a function that is generated from the lines."""
        text = _Text({})
        body = ["".join(f"value_{i}, " for i in range(len(self.is_tensor))) + "= given"] if self.is_tensor else []
        for line in self.lines:
            call = text.write_line(line)
            match line:
                case Checked() | Bumped() | Called(into=()):
                    body.append(call)
                case Called(into=(number,)):
                    body.append(f"value_{number} = {call}")
                case Called():
                    body.append(f"{''.join(f'value_{number}, ' for number in line.into)}= {call}")
                case _:
                    body.append(f"value_{line.into} = {call}")
        body.append(f"return [{', '.join('None' if number is None else f'value_{number}' for number in self.results)}]")
        source = "\n    ".join(["def repeat(given):", *body])
        exec(compile(source, _FILE, "exec"), text.constants)
        return cast(Repeat, text.constants.pop("repeat"))  # a function in its own globals would be a cycle


@dataclass(frozen=True, slots=True)
class _Text:
    """Generates the source of `Recording.repeat`.

    Attributes:
        constants: the objects that the source uses, by name.
    """

    constants: dict[str, Any]

    def write_line(self, line: Line) -> str:
        match line:
            case Allocated(_, shape, strides, dtype, device):
                allocate = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
                return f"{self._add_constant(allocate)}()"
            case Fixed(_, tensor):
                return self._add_constant(tensor)
            case Viewed(_, base, shape, strides, offset, _):
                return f"value_{base}.as_strided({shape!r}, {strides!r}, {offset})"
            case Bumped(numbers):
                values = "".join(f"value_{number}, " for number in numbers)
                return f"{self._add_constant(torch.autograd.graph.increment_version)}(({values}))"
            case Checked(_, check):
                return f"{self._add_constant(check)}()"
            case Called(_, function, arguments, options, _):
                texts = [self._write_value(argument) for argument in arguments]
                if function in _METHODS and not options and len(texts) <= 2:
                    return f"{texts[0]}.{_METHODS[function]}({', '.join(texts[1:])})"
                texts += [f"{key}={self._write_value(value)}" for key, value in options.items()]
                return f"{self._add_constant(function)}({', '.join(texts)})"

    def _write_value(self, value: Any) -> str:
        if isinstance(value, TensorNumber):
            return f"value_{value.number}"
        if type(value) in (list, tuple) and any(True for _ in tensor_numbers((value,))):
            inner = "".join(f"{self._write_value(element)}, " for element in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        return self._add_constant(value)

    def _add_constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


class _RecorderOfThread(threading.local):
    recorder: CallRecorder | None = None


current = _RecorderOfThread()
"""Holds, as `recorder`, the recorder of the call that this thread executes, or `None`."""


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


def not_repeated(reason: str) -> None:
    """Marks the current call as not repeatable, for this reason."""
    recorder = current.recorder
    if recorder is not None:
        recorder.refuse(reason)


def recorded(
    call: Callable[[Sequence[Tensor | None]], Sequence[Any]],
    arguments: Sequence[Tensor | None],
    empty: Collection[int] = (),
) -> tuple[Sequence[Any], Recording | str]:
    """Returns the results of a call, and its recording or the reason why it cannot be recorded.

    Args:
        call: function whose operators autograd does not record. Its results are tensors or `None`.
        arguments: arguments of the call.
        empty: positions of results that the call allocates, but does not write.
    """
    # If one tensor is passed twice in this call, two different tensors may be passed in the next call.
    distinct = list[Tensor | None]()
    for tensor in arguments:
        is_repeated = tensor is not None and any(tensor is other for other in distinct)
        distinct.append(tensor.detach() if is_repeated and tensor is not None else tensor)
    recorder = CallRecorder(distinct)
    outer_recorder, current.recorder, outer_watcher, watching.by = (
        current.recorder,
        recorder,
        watching.by,
        recorder.launched,
    )
    try:
        with recorder:
            results = call(distinct)
    finally:
        current.recorder, watching.by = outer_recorder, outer_watcher
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
        reason: the reason why the call cannot be repeated; `None` if it can be repeated.
    """

    def __init__(self, arguments: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self._paused = False
        self._tensor_by_number: dict[int, Tensor] = {}  # tensors by number. References keep ids and addresses unique
        self._number_by_id: dict[int, int] = {}
        self._memory_by_address: dict[int, _RecordedMemory] = {}
        self._lines: list[tuple[Line, frozenset[int], bool]] = []  # line, numbers that it uses, True if it writes
        self._are_tensors = tuple([tensor is not None for tensor in arguments])
        self._count = len(arguments)
        for i, tensor in enumerate(arguments):
            if tensor is not None:
                self._tensor_by_number[i], self._number_by_id[id(tensor)] = tensor, i
                self._memory_by_address[_find_address(tensor)] = _RecordedMemory(None, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        result = func(*args, **options)
        if self.reason is None and not self._paused:
            self._record_operator(func, args, options, result)
        return result

    def note(self, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Implements `noted`."""
        if self._paused:
            return function(*arguments, **options)
        result = self._run_paused(function, *arguments, **options)
        entry = getattr(function, "entry", None)
        launch_data = None if entry is None else entry(*arguments[1:], **options)
        self.launched(function, arguments, launch_data, options, result)
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
        if self._paused or self.reason is not None:
            return
        for tensor in _iterate_tensors((arguments, options)):
            if _find_address(tensor) in self._memory_by_address:
                self._memory_by_address[_find_address(tensor)].written = True
        self._record_call(result, function, arguments, options or {}, entry, writes=True)

    def check(self, check: Callable[[], object], number: Tensor) -> None:
        """Implements `noted_check`."""
        self._run_paused(check)
        self._lines.append((Checked(number, check), frozenset(), True))

    def bump(self, tensors: Sequence[Tensor]) -> None:
        """Implements `written_by_kernel`."""
        numbers = tuple(map(self._find_number, tensors))
        self._lines.append((Bumped(numbers), frozenset(numbers), True))

    def _run_paused(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        was_paused, self._paused = self._paused, True
        try:
            return function(*arguments, **options)
        finally:
            self._paused = was_paused

    def fix(self, tensor: Tensor) -> None:
        """Implements `same_in_each_call`."""
        if id(tensor) not in self._number_by_id:
            self._memory_by_address[_find_address(tensor)] = _RecordedMemory(None, True)
            self._lines.append((Fixed(self._add_tensor(tensor), tensor), frozenset(), False))

    def refuse(self, reason: str) -> None:
        """Marks the call as not repeatable, for this reason. Later reasons are ignored."""
        self.reason = self.reason or reason

    def recording(self, results: Sequence[Any], empty: Collection[int] = ()) -> Recording | str:
        """Returns the recording of the call, or the reason why it cannot be repeated.

        Args:
            results: results of the call.
            empty: see `recorded`.
        """
        numbers = tuple([None if result is None else self._find_number(result) for result in results])
        for i, result in enumerate(results):
            if i not in empty:
                self._check_written(result)
        if self.reason is not None:
            return self.reason
        required, lines = {*numbers}, []
        for line, operands, writes in reversed(self._lines):
            match line:
                case Called():
                    line_results = line.into
                case Bumped() | Checked():
                    line_results = ()
                case _:
                    line_results = (line.into,)
            if writes or not required.isdisjoint(line_results):
                required |= operands
                lines.append(line)
        return Recording(self._are_tensors, tuple(reversed(lines)), numbers)

    # -- recorded events -------------------------------------------------------------------------------------------

    def _record_operator(self, func: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> None:
        tensors = [*_iterate_tensors((args, options))]
        if not tensors and not any(True for _ in _iterate_tensors(result)):
            return  # an operator without tensors, such as `aten.promote_types`
        written = _list_written(func, args, options)
        if func.overloadpacket is _aten.set_ or any(not isinstance(value, Tensor) for value in _list_results(result)):
            self.refuse(f"{func} returns a value that is not a tensor")
            return
        if torch.Tag.dynamic_output_shape in func.tags:
            self.refuse(f"the shape of the result of {func} depends on values")
            return
        for tensor in tensors:
            memory = self._memory_by_address.get(_find_address(tensor))
            if memory is not None and any(tensor is argument for argument in written):
                memory.written = True
            elif not func.is_view:
                self._check_written(tensor)
        if func in _SAME:
            self._number_by_id.setdefault(id(result), self._find_number(args[0]))
            self._tensor_by_number[self._take_number()] = result
        elif func in _EMPTY:
            shape, strides = tuple(result.shape), result.stride()
            line = Allocated(self._number_result(result, empty=True), shape, strides, result.dtype, result.device)
            self._lines.append((line, frozenset(), False))
        elif not (results := _list_results(result)) or not all(self._record_view(view) for view in results):
            self._record_call(result, func, args, options, None, writes=bool(written))

    def _record_view(self, result: Tensor) -> bool:
        """Records a view of an allocated tensor as a view of the whole allocation. Returns False for other tensors."""
        if id(result) in self._number_by_id or result.is_neg() or result.is_conj():
            return False
        memory = self._memory_by_address.get(_find_address(result))
        if memory is None or memory.base is None:
            return False
        base = self._tensor_by_number[memory.base]
        if base.dtype != result.dtype or base.device != result.device:
            return False
        geometry = tuple(result.shape), result.stride(), int(result.storage_offset())
        if geometry == (tuple(base.shape), base.stride(), int(base.storage_offset())):
            self._number_by_id[id(result)] = memory.base
            self._tensor_by_number[self._take_number()] = result
        else:
            line = Viewed(self._add_tensor(result), memory.base, *geometry, result.dtype)
            self._lines.append((line, frozenset((memory.base,)), False))
        return True

    def _record_call(
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
        results = _list_results(result)
        into: tuple[int, ...] = ()
        positional = self._replace_tensors(tuple(arguments))
        keywords = {key: self._replace_tensors(value) for key, value in options.items()}
        operands = frozenset(tensor_numbers((positional, keywords)))
        if any(id(tensor) not in self._number_by_id for tensor in results):
            into = tuple([self._number_result(tensor) for tensor in results])
        self._lines.append((Called(into, function, positional, keywords, entry), operands, writes))

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _take_number(self) -> int:
        self._count += 1
        return self._count - 1

    def _add_tensor(self, tensor: Tensor) -> int:
        number = self._take_number()
        self._tensor_by_number[number], self._number_by_id[id(tensor)] = tensor, number
        return number

    def _number_result(self, tensor: Tensor, *, empty: bool = False) -> int:
        """Returns the number of a tensor that a line returns. Assigns a number to a new tensor."""
        if id(tensor) in self._number_by_id:
            return self._number_by_id[id(tensor)]
        number = self._add_tensor(tensor)
        if _find_address(tensor) not in self._memory_by_address:
            base = number if tensor.untyped_storage().nbytes() == tensor.nbytes else None
            self._memory_by_address[_find_address(tensor)] = _RecordedMemory(base, not empty)
        return number

    def _find_number(self, tensor: Tensor) -> int:
        number = self._number_by_id.get(id(tensor))
        if number is None:
            self.refuse(f"it reads a tensor {tuple(tensor.shape)} that is not among its arguments")
            return -1
        return number

    def _check_written(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.numel():
            memory = self._memory_by_address.get(_find_address(tensor))
            if memory is not None and not memory.written:
                self.refuse("an operation that is not recorded writes to the memory of a tensor that it reads")

    def _replace_tensors(self, value: Any) -> Any:
        """Returns a copy of the value with a `TensorNumber` for each tensor."""
        if isinstance(value, Tensor):
            return TensorNumber(self._find_number(value))
        if type(value) in (list, tuple):
            return type(value)([self._replace_tensors(element) for element in value])
        return value


def tensor_numbers(value: Any) -> Iterator[int]:
    """Iterates over the numbers of all tensors in the arguments of a line."""
    if isinstance(value, TensorNumber):
        yield value.number
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensor_numbers(element)
    elif isinstance(value, dict):
        yield from tensor_numbers([*value.values()])


def _find_address(tensor: Tensor) -> int:
    """Returns an integer that is equal for tensors in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def _list_results(result: Any) -> list[Any]:
    if result is None:
        return []
    return [*result] if isinstance(result, list | tuple) else [result]


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _iterate_tensors(element)
    elif isinstance(value, dict):
        yield from _iterate_tensors([*value.values()])


def _list_written(func: Any, args: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
    """Returns the arguments that an operator writes to."""
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            written += _iterate_tensors(args[i] if i < len(args) else options.get(argument.name))
    return written
