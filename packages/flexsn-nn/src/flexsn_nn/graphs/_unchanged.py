"""Compares many values and tensors in few passes, without a Python operation for each value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, starmap
from operator import attrgetter, is_, methodcaller, not_
from types import CellType
from typing import Any

from torch import Tensor, nn

_values_of = methodcaller("values")
_contents = attrgetter("cell_contents")
_layout = attrgetter("shape", "dtype", "requires_grad")
_hooks = attrgetter("_backward_hooks")


class SameObjects:
    """Containers whose contents must not change. Sizes are compared by value, and objects by identity.

    Attributes:
        sized: containers whose lengths are compared.
        mappings, sequences: containers whose values are compared in order. These containers are also in `sized`.
        parts: for each mapping of which only some values are compared, its method `get` and the keys of these values.
        cells: closure variables of functions.
    """

    def __init__(self) -> None:
        self.sized: list[Sized] = []
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Sequence[Any]] = []
        self.parts: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []
        self.cells: list[CellType] = []
        self._sizes: list[int] = []
        self._objects: list[Any] | None = None

    def remember(self) -> None:
        """Stores the current sizes and objects for later comparisons."""
        self._sizes = list(map(len, self.sized))
        try:
            self._objects = list(self._read_objects())
        except ValueError:  # a closure variable has no value
            self._objects = None

    def same(self) -> bool:
        """True if all sizes and objects are the same as at the last `remember`."""
        if self._objects is None or list(map(len, self.sized)) != self._sizes:
            return False
        try:
            return all(map(is_, self._read_objects(), self._objects))
        except ValueError:
            return False

    def _read_objects(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(map(_values_of, self.mappings)),
            chain.from_iterable(self.sequences),
            chain.from_iterable(starmap(map, self.parts)),
            map(_contents, self.cells),
        )


class SameTensors:
    """Plain tensors, compared by memory, layout, dtype, `requires_grad`, and the presence of hooks."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._properties = self._read_properties()

    def same(self) -> bool:
        """True if none of the compared properties has changed."""
        return self._properties == self._read_properties()

    def _read_properties(self) -> tuple[list[Any], ...]:
        tensors = self._tensors
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.stride, tensors)),
            list(map(_layout, tensors)),
            list(map(not_, map(_hooks, tensors))),
        )


def is_plain(tensor: Tensor, device: str) -> bool:
    """True if a tensor is on a device of this type, and its class is `Tensor` or `nn.Parameter`, not a subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == device
