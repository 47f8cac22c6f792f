"""A dictionary with a limited number of entries."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

_Value = TypeVar("_Value")


class Recent(dict[Hashable, _Value]):
    """A dictionary of at most `LIMIT` entries. A new entry in a full dictionary replaces the oldest entry.

    The dictionary stores results that depend on sizes. Its limit bounds the memory of programs with many sizes.
    """

    LIMIT = 256

    def __setitem__(self, key: Hashable, value: _Value) -> None:
        if len(self) >= self.LIMIT and key not in self:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)
