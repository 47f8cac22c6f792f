"""A dictionary that forgets."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

_Value = TypeVar("_Value")


class Recent(dict[Hashable, _Value]):
    """A dictionary of at most `LIMIT` entries; the one that was added first is forgotten first.

    What depends on sizes is kept in it, so that a program that sees ever new ones does not grow.
    """

    LIMIT = 256

    def __setitem__(self, key: Hashable, value: _Value) -> None:
        if len(self) >= self.LIMIT and key not in self:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)
