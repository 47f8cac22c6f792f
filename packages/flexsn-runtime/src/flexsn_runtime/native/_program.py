"""Registers recorded calls with the compiled launcher, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from flexsn_codegen.targets._entry import Entry, unwatched
from flexsn_runtime._torch_private import OpOverload
from flexsn_runtime.calls._recorded import (
    Allocated,
    Bumped,
    Called,
    Checked,
    Fixed,
    Recording,
    TensorNumber,
    Viewed,
    tensor_numbers,
)


class NativeProgram:
    """A recorded call, registered with the compiled launcher.

    Args:
        module: the compiled launcher.
        recording: recording of a call for which `can_be_native` returns True.
        slots: numbers of the tensors that each call receives; `None` for all tensors that the recorded call received.
            Some of the tensors in `slots` may be absent.
        results: numbers of the results; `None` for the results of the recording.

    Attributes:
        program: the program that the launcher has registered.
        watched: function that returns True if a hook watches launches. The compiled launcher would not call the hook.
    """

    def __init__(
        self,
        module: ModuleType,
        recording: Recording,
        slots: Sequence[int] | None = None,
        results: Sequence[int | None] | None = None,
    ) -> None:
        self._views: dict[int, Viewed] = {}
        lines = recording.lines
        count = 1 + max([len(recording.is_tensor) - 1, *(number for line in lines for number in _list_results(line))])
        present = [i for i, is_tensor in enumerate(recording.is_tensor) if is_tensor]
        self.program = module.Program(count, present if slots is None else list(slots))
        for line in lines:
            self._add(line)
        returned = list(recording.results if results is None else results)
        self._create_views(returned)
        self.program.returns(returned)
        watches = [entry.watched for entry in _list_entries(recording) if entry.watched is not unwatched]
        self.watched: Callable[[], bool] = watches[0] if watches else unwatched

    def _add(self, line: Any) -> None:
        match line:
            case Allocated(into, shape, strides, dtype, device):
                self.program.allocate(into, shape, strides, torch.empty(0, dtype=dtype, device=device))
            case Fixed(into, tensor):
                self.program.fix(into, tensor)
            case Viewed():  # created only if an operator or a result uses the view; kernels use its address
                self._views[line.into] = line
            case Checked(number, check):
                self.program.check(number, check)
            case Bumped(numbers):
                self.program.bump(list(numbers))
            case Called(_, _, (tensors, *_), _, Entry() as entry):
                self._launch(entry, [placeholder.number for placeholder in tensors])
            case Called():
                self._call(line)

    def _launch(self, entry: Entry, numbers: list[int]) -> None:
        bases, offsets = [], []
        for number in numbers:
            view = self._views.get(number)
            bases.append(number if view is None else view.base)
            offsets.append(0 if view is None else view.offset * view.dtype.itemsize)
        self.program.launch(
            entry.address,
            bases,
            offsets,
            entry.numbers,
            entry.programs,
            entry.beside,
            entry.threads,
            entry.shared,
            entry.together,
            entry.owner,
        )

    def _call(self, line: Called) -> None:
        numbers: list[int] = []
        stand_ins: list[torch.Tensor] = []

        def stand_in(value: Any) -> Any:
            if isinstance(value, TensorNumber):
                numbers.append(value.number)
                stand_ins.append(torch.empty(0))
                return stand_ins[-1]
            if type(value) in (list, tuple):
                return type(value)([stand_in(element) for element in value])
            return value

        self._create_views(tensor_numbers((line.arguments, line.options)))
        schema = line.function._schema  # type: ignore[attr-defined]
        arguments = stand_in(line.arguments)
        options = {key: stand_in(value) for key, value in line.options.items()}
        self.program.call(schema.name, schema.overload_name, arguments, options, stand_ins, numbers, list(line.into))

    def _create_views(self, numbers: Iterable[int | None]) -> None:
        """Creates the views with these numbers, unless they have been created before."""
        for number in numbers:
            view = None if number is None else self._views.pop(number, None)
            if view is not None:
                self.program.view(*view[:5])


def can_be_native(recording: Recording) -> bool:
    """True if a recording only calls torch's operators, and kernels that can be launched by address."""
    calls = [line for line in recording.lines if isinstance(line, Called)]
    return all(isinstance(line.function, OpOverload) or line.entry is not None for line in calls)


def _list_entries(recording: Recording) -> Iterator[Entry]:
    for line in recording.lines:
        if isinstance(line, Called) and line.entry is not None:
            yield line.entry


def _list_results(line: Any) -> tuple[int, ...]:
    match line:
        case Called(into=into):
            return into
        case Checked() | Bumped():
            return ()
    return (line.into,)
