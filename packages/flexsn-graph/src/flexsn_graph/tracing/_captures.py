"""Numbered values that a core reads besides its arguments."""

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

_TOLD_APART = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, Ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Captures:
    """Captured tensors, each once, and what the core computes from them alone.

    Attributes:
        stand_ins: a fake tensor for each such value; its place in the list is the value's number.
        tensors: the captured tensors, by number, in order of first use.
        aliases: other captured tensors that are the same memory as one of them, by its number.
        passing: ids of tensors that the core itself makes of captured ones, as `w.data`.
        decided: the calls that give the other values, by function and arguments.
        lifted: the values that the step needs, once that is known; the others are there for `calls`.
        reads_sizes: True if the core may depend on the sizes of its arguments.
        locations: autograd sequence number to the user's line, so that a backward formula can name it; of the last
            run of the core.
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
        # The tensors are kept, so that an id or an address is not given to another one meanwhile.
        self._kept: list[Any] = []
        self._by_identity: dict[int, tuple[int, Tensor]] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._by_storage: dict[int, int] = {}

    def is_captured(self, tensor: Tensor) -> bool:
        """True if `tensor` is the user's: neither an argument nor computed by the core."""
        return not (isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode)

    def has(self, tensor: Tensor) -> bool:
        """True if an operation has read this tensor of the user's."""
        return id(tensor) in self._by_identity

    def find(self, tensor: Tensor) -> int | None:
        """The number of a captured tensor, or of one that is the same memory (`w.data` is a new object)."""
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)][0]
        memory = _memory_of(tensor)
        number = self._by_memory.get(memory)
        if number is None or _memory_of(self.tensors[number]) != memory:
            return None
        before = self.tensors[number]
        if tensor.requires_grad and before.requires_grad:
            return None  # another variable, with a gradient of its own
        if tensor.requires_grad or id(before) in self.passing:
            # `w.data` was met before `w`: it is `w` that has a gradient and can be moved.
            self.tensors[number] = tensor
            tensor, other = before, tensor
            self._by_identity[id(other)] = (number, other)
        if id(tensor) not in self.passing:
            self.aliases.append((number, tensor))
        self._by_identity[id(tensor)] = (number, tensor)
        return number

    def note_passing(self, tensors: Iterable[Tensor]) -> None:
        """Notes tensors that are there while the core runs only."""
        for tensor in tensors:
            self._kept.append(tensor)
            self.passing.add(id(tensor))

    def add(self, tensor: Tensor) -> int:
        """Records a captured tensor that `find` does not know."""
        number = self.add_value(tensor)
        self.tensors[number] = tensor
        self._by_identity[id(tensor)] = (number, tensor)
        self._by_memory[_memory_of(tensor)] = number
        return number

    def add_value(self, like: Tensor) -> int:
        """Makes a stand-in for a new value."""
        number = len(self.stand_ins)
        self.stand_ins.append(fake_like(self._mode, like))
        self._by_storage[storage_of(self.stand_ins[number])] = number
        return number

    def call_of(self, number: int) -> RecordedCall | None:
        """The call that gives a value; `None`: it is captured."""
        return next((call for call in self.decided.values() if number in call.results), None)

    def stays(self, number: int) -> bool:
        """True if a value can be computed in the step, or is captured."""
        call = self.call_of(number)
        return call is None or call.stays

    def identities(self, arguments: Any) -> tuple[int, ...]:
        """Identities of arguments that their `repr` does not distinguish: a NumPy array's is short."""
        others = [a for a in pytree.tree_leaves(arguments) if not isinstance(a, _TOLD_APART)]
        self._kept += others
        return tuple(map(id, others))

    def location_of(self, sequence_number: int) -> SourceLocation | None:
        """The user's line of an autograd node. That of a function of the user's own has the number before its ops'."""
        later = [number for number in self.locations if number >= sequence_number]
        return self.locations[min(later)] if later else None

    def number_of(self, storage: int) -> int | None:
        """The value whose stand-in has this memory."""
        return self._by_storage.get(storage)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The fake of a captured tensor that a core returns as it is; a fake tensor unchanged."""
        if not self.is_captured(tensor):
            return tensor
        number = self.find(tensor)
        return self.stand_ins[self.add(tensor) if number is None else number]


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return (
        storage_of(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
