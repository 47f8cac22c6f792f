"""A dictionary with a limited number of entries."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

_Value = TypeVar("_Value")


class Recent(dict[Hashable, _Value]):
    """A dictionary of at most `LIMIT` entries. When it is full, it drops the entry that was added first.

    Results that depend on sizes are stored in it, so that the memory of a program with many different sizes is limited.
    """

    LIMIT = 256

    def __setitem__(self, key: Hashable, value: _Value) -> None:
        if len(self) >= self.LIMIT and key not in self:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)
