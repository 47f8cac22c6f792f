"""Assigns numbers to the tensors that a core captures, and to the values computed from captured tensors alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from flexsn_graph._location import SourceLocation
from flexsn_graph._torch_private import FakeTensor, FakeTensorMode, fake_like
from flexsn_graph._torch_private_ops import pytree
from flexsn_graph.tracing._prologue import RecordedCall, Ref
from flexsn_graph.tracing._refusals import storage_of

_UNAMBIGUOUS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, Ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Captures:
    """Captured tensors without duplicates, and values that the core computes from captured tensors alone.

    Attributes:
        stand_ins: a fake tensor for each captured or computed value. The index of the fake tensor is the value's
            number.
        tensors: the captured tensors, by number, in order of first use.
        aliases: captured tensors that share the memory of a tensor in `tensors`, each with the number of that tensor.
        passing: ids of tensors that the core itself derives from captured tensors, such as `w.data`.
        decided: the calls that compute values from captured tensors alone or write to such values, by function and
            arguments.
        lifted: numbers of the values that the step needs, or `None` until the end of discovery. All other values are
            used only before the loop.
        reads_sizes: True if the core may depend on the sizes of its arguments.
        locations: for each autograd sequence number, the user's line in the last run of the core. Errors in backward
            formulas name this line.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.stand_ins: list[FakeTensor] = []
        self.tensors: dict[int, Tensor] = {}
        self.aliases: list[tuple[int, Tensor]] = []
        self.passing: set[int] = set()
        self.decided: dict[Hashable, RecordedCall] = {}
        self.lifted: tuple[int, ...] | None = None
        self.reads_sizes = False
        self.locations: dict[int, SourceLocation] = {}
        # Objects kept alive, so that no other objects get their ids and addresses in the meantime.
        self._owners: list[Any] = []
        self._by_identity: dict[int, tuple[int, Tensor]] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._by_storage: dict[int, int] = {}

    def is_captured(self, tensor: Tensor) -> bool:
        """True if `tensor` belongs to the user: neither an argument of the core nor a value that the core computed."""
        return not (isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode)

    def has(self, tensor: Tensor) -> bool:
        """True if an operation has read this tensor, which belongs to the user."""
        return id(tensor) in self._by_identity

    def find(self, tensor: Tensor) -> int | None:
        """The number of a captured tensor, found by identity or by memory (`w.data` is a new object), or `None`."""
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)][0]
        memory = _describe_memory(tensor)
        number = self._by_memory.get(memory)
        if number is None or _describe_memory(self.tensors[number]) != memory:
            return None
        recorded = self.tensors[number]
        if tensor.requires_grad and recorded.requires_grad:
            return None  # a different variable, with its own gradient
        if tensor.requires_grad or id(recorded) in self.passing:
            # `w.data` was recorded before `w`. Only `w` has a gradient and can be moved.
            self.tensors[number] = tensor
            tensor, other = recorded, tensor
            self._by_identity[id(other)] = (number, other)
        if id(tensor) not in self.passing:
            self.aliases.append((number, tensor))
        self._by_identity[id(tensor)] = (number, tensor)
        return number

    def note_passing(self, tensors: Iterable[Tensor]) -> None:
        """Records tensors that exist only while the core runs."""
        for tensor in tensors:
            self._owners.append(tensor)
            self.passing.add(id(tensor))

    def add(self, tensor: Tensor) -> int:
        """Records a captured tensor for which `find` returns `None`."""
        number = self.add_value(tensor)
        self.tensors[number] = tensor
        self._by_identity[id(tensor)] = (number, tensor)
        self._by_memory[_describe_memory(tensor)] = number
        return number

    def add_value(self, like: Tensor) -> int:
        """Creates a stand-in for a new value and returns its number."""
        number = len(self.stand_ins)
        self.stand_ins.append(fake_like(self._mode, like))
        self._by_storage[storage_of(self.stand_ins[number])] = number
        return number

    def call_of(self, number: int) -> RecordedCall | None:
        """The call that computes a value, or `None` if the value is captured."""
        return next((call for call in self.decided.values() if number in call.results), None)

    def stays(self, number: int) -> bool:
        """True if a value is captured, or can be computed in the step."""
        call = self.call_of(number)
        return call is None or call.stays

    def identities(self, arguments: Any) -> tuple[int, ...]:
        """Identities of arguments, such as NumPy arrays, whose `repr` is ambiguous."""
        ambiguous = [a for a in pytree.tree_leaves(arguments) if not isinstance(a, _UNAMBIGUOUS)]
        self._owners += ambiguous
        return tuple(map(id, ambiguous))

    def location_of(self, sequence_number: int) -> SourceLocation | None:
        """The user's line of an autograd node, or `None`. For a custom function, this is the line of its first op."""
        later = [number for number in self.locations if number >= sequence_number]
        return self.locations[min(later)] if later else None

    def number_of(self, storage: int) -> int | None:
        """The number of the value whose stand-in has this memory, or `None`."""
        return self._by_storage.get(storage)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The stand-in of a captured tensor, which is recorded if it is new. Returns any other tensor unchanged."""
        if not self.is_captured(tensor):
            return tensor
        number = self.find(tensor)
        return self.stand_ins[self.add(tensor) if number is None else number]


def _describe_memory(tensor: Tensor) -> tuple[Any, ...]:
    return (
        storage_of(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
