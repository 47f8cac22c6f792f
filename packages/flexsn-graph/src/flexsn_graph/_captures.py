"""What a core reads besides its arguments, numbered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor

from flexsn_graph._location import SourceLocation
from flexsn_graph._prologue import Call
from flexsn_graph._refusals import storage_of
from flexsn_graph._torch_private import FakeTensor, FakeTensorMode, fake_like


class Captures:
    """Captured tensors, each once, and what the core computes from them alone.

    Attributes:
        stand_ins: a fake tensor for each such value; its place in the list is the value's number.
        tensors: the captured tensors, by number, in order of first use.
        decided: the calls that give the other values, by function and arguments.
        lifted: the values that the step needs, once that is known; the others are there for `calls`.
        locations: autograd sequence number to the user's line, so that a backward formula can name it; of the last
            run of the core.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.stand_ins: list[FakeTensor] = []
        self.tensors: dict[int, Tensor] = {}
        self.decided: dict[Hashable, Call] = {}
        self.lifted: tuple[int, ...] | None = None
        self.locations: dict[int, SourceLocation] = {}
        # The tensors are kept, so that an id or an address is not given to another one meanwhile.
        self._by_identity: dict[int, tuple[int, Tensor]] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._by_storage: dict[int, int] = {}

    def is_captured(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the user's: neither an argument nor computed by the core."""
        return not (isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode)

    def find(self, tensor: Tensor) -> int | None:
        """The number of a captured tensor, or of one that is the same memory (`w.data` is a new object)."""
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)][0]
        memory = _memory_of(tensor)
        number = self._by_memory.get(memory)
        if number is None or _memory_of(self.tensors[number]) != memory:
            return None
        if tensor.requires_grad:
            if self.tensors[number].requires_grad:
                return None  # another variable, with a gradient of its own
            # `w.data` was met before `w`: it is `w` that has a gradient and can be moved.
            self.tensors[number] = tensor
        self._by_identity[id(tensor)] = (number, tensor)
        return number

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

    def call_of(self, number: int) -> Call | None:
        """The call that gives a value; `None`: it is captured."""
        return next((call for call in self.decided.values() if number in call.results), None)

    def has_gradient(self, number: int) -> bool:
        """Whether a value requires a gradient, or is computed from one that does."""
        call = self.call_of(number)
        return self.tensors[number].requires_grad if call is None else call.has_gradient

    def roots(self, numbers: Iterable[int]) -> set[int]:
        """What a step that computes these values has to be given."""
        found: set[int] = set()
        for number in numbers:
            call = self.call_of(number)
            found |= self.roots(call.reads()) if call is not None and call.stays else {number}
        return found

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
